"""Weights & Biases get what results.json says, as W&B itself writes it while offline."""

import hashlib
import json
import os
import shutil
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbench.core.config import ConfigError
from kvbench.eval.protocol.scores import Metric
from kvbench.runs.record.results import read_results
from kvbench.runs.record.samples import order_worst_first, read_scores
from kvbench.runs.score.wandb import WandB
from tests.support.results import made_up
from tests.support.run_folders import GIVEN, write_reading_runs, write_run
from tests.support.wandb_file import read_entry

RUN = made_up(
    "heatkv", 0.1, {"psnr": Metric(25.0, "higher"), "lpips": Metric(None, "lower", status="skipped")}
)


@pytest.fixture
def offline_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real package, which writes below `tmp_path` alone and sends nothing."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("CACHE", "CONFIG"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path))
    monkeypatch.delenv("WANDB_DATA_DIR", raising=False)


@pytest.mark.parametrize(("key", "mode"), [(None, "offline"), ("secret", "online")])
def test_entries_are_online_where_there_is_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str | None, mode: str
) -> None:
    calls: dict[str, Any] = {}
    kept: list[str | None] = []
    run = SimpleNamespace(log=lambda _: kept.append(os.environ.get("WANDB_DATA_DIR")), finish=lambda: None)
    module = SimpleNamespace(
        init=lambda **more: calls.update(more) or run, __spec__=ModuleSpec("wandb", None)
    )
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("MODE", "API_KEY", "DATA_DIR"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    if key is not None:
        monkeypatch.setenv("WANDB_API_KEY", key)
    WandB(images=0).send(tmp_path, RUN)
    assert calls["mode"] == mode
    assert kept == [str(tmp_path / "wandb") if key is None else None]
    assert "WANDB_DATA_DIR" not in os.environ


@pytest.mark.slow
def test_a_run_arrives_with_group_and_samples(whole: Path, tmp_path: Path, offline_wandb: None) -> None:
    results = read_results(whole)
    shutil.copytree(whole.parent, tmp_path / "fake")  # W&B writes beside what it sends
    copy = tmp_path / "fake" / whole.name
    WandB(images=3).send(copy, results, "budget")
    entry = read_entry(copy)
    assert (entry.run.run_group, entry.run.job_type) == ("budget", "streaming_llm")
    assert (entry.run.run_id, entry.run.display_name) == (results.run, results.run)
    assert list(entry.run.tags) == ["fake", "?", "budget 0.5"]
    assert entry.config["reference"] == results.reference
    assert entry.config["model"] == results.config["model"]
    [values] = entry.history
    psnr = results.metrics["psnr"]
    assert [values["psnr"], values["psnr/low"], values["psnr/high"]] == [psnr.value, *(psnr.ci95 or ())]
    assert values["memory/peak_tokens"] == results.memory.peak_tokens
    assert (entry.files / values["contact_sheet.path"]).read_bytes() == (
        whole / "contact_sheet.png"
    ).read_bytes()
    lines = (whole / "metrics" / "psnr-uint8.samples.jsonl").read_text().splitlines()
    decibels = {row["index"]: row["psnr"] for row in map(json.loads, lines)}
    worst = sorted(decibels, key=lambda index: decibels[index])[:3]
    table = entry.table("samples")
    assert table["columns"] == ["index", "prompt", "sample", "reference", "psnr"]
    assert [row[0] for row in table["data"]] == worst
    assert [row[1] for row in table["data"]] == [f"prompt {index}" for index in worst]
    assert [row[4] for row in table["data"]] == [decibels[index] for index in worst]
    sides = (whole, whole.parent / str(results.reference))
    assert all(path.is_relative_to(copy / "wandb") for path in entry.staged.values())
    sent = {hash_file(path) for path in entry.staged.values()}
    assert {hash_file(side / f"images/{index:06d}.png") for side in sides for index in worst} <= sent


def test_texts_that_were_read_arrive_by_their_beginning(tmp_path: Path, offline_wandb: None) -> None:
    _, run = write_reading_runs(tmp_path, {"h2o": ((0.5,) * 8, (2.0,) * 8)})
    folder = tmp_path / run.model / run.run
    records = (folder / "samples.jsonl").read_text().replace(GIVEN, GIVEN + "x" * 300)
    (folder / "samples.jsonl").write_text(records)
    WandB(images=3).send(folder, run)
    entry = read_entry(folder)
    table = entry.table("samples")
    assert table["columns"] == ["index", "prompt", "kl"]
    assert [[row[0], row[2]] for row in table["data"]] == [[1, 2.0], [0, 0.5]]
    assert table["data"][0][1] == f"{GIVEN}{'x' * (200 - len(GIVEN))} …"
    assert not [path for path in entry.staged.values() if path.suffix == ".png"]


def hash_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_sweep_ends_with_its_table_and_dashboard(tmp_path: Path, offline_wandb: None) -> None:
    page = tmp_path / "dashboard.html"
    page.write_text("<!doctype html><p>é")
    more = made_up("full", 1, {"psnr": Metric(None, "higher"), "fid": Metric(2.0, "lower", ci95=(1.5, 2.5))})
    folder = tmp_path / "0a34"
    folder.mkdir()
    WandB().send_sweep(folder, "heatkv_table1", [RUN, more], page)
    entry = read_entry(folder)
    assert (entry.run.run_group, entry.run.job_type) == ("heatkv_table1", "sweep")
    assert (entry.run.run_id, entry.run.display_name) == ("sweep-0a34", "heatkv_table1")
    table = entry.table("runs")
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert [row["run"] for row in rows] == [RUN.run, more.run]
    assert [row["budget"] for row in rows] == [0.1, 1]
    assert [row["psnr"] for row in rows] == [25.0, None]
    assert [rows[1][name] for name in ("fid", "fid/low", "fid/high")] == [2.0, 1.5, 2.5]
    assert rows[0]["fid"] is None
    assert (entry.files / entry.history[0]["dashboard.path"]).read_text() == page.read_text()


def test_the_callers_own_run_stays_open(tmp_path: Path, offline_wandb: None) -> None:
    import wandb

    for name in ("own", "sent"):
        (tmp_path / name).mkdir()
    with wandb.init(project="mine", dir=str(tmp_path / "own")) as own:
        own.log({"loss": 2.0})
        WandB(images=0).send(tmp_path / "sent", RUN)
        assert wandb.run is own
        own.log({"loss": 1.0})
    entries = {name: read_entry(tmp_path / name) for name in ("own", "sent")}
    assert [values["loss"] for values in entries["own"].history] == [2.0, 1.0]
    assert [values["psnr"] for values in entries["sent"].history] == [25.0]
    assert entries["sent"].run.run_id == RUN.run


def test_the_first_metric_against_the_reference_says_which_samples_are_worst(tmp_path: Path) -> None:
    metrics = {
        "length": Metric(2.0, "lower"),
        "psnr": Metric(30.0, "higher", needs_reference=True),
        "lpips": Metric(0.1, "lower", needs_reference=True),
    }
    results = made_up("swa", 0.5, metrics, n=3)
    values = {"length": [1, 2, 3], "lpips": [0.3, 0.2, 0.1], "psnr": [None, 20, 10]}
    samples = [("a", {}, b"")] * 3
    folder = write_run(tmp_path, results, samples, values={name: {name: one} for name, one in values.items()})
    scores = read_scores(folder, results)
    assert scores[0] == {"length": 1.0, "psnr": None, "lpips": 0.3}
    assert order_worst_first(results, scores) == [2, 1, 0]  # equal images have no PSNR
    del metrics["psnr"]
    assert order_worst_first(made_up("swa", 0.5, metrics), scores) == [0, 1, 2]
    assert order_worst_first(made_up("swa", 0.5, {"length": metrics["length"]}), scores) == [2, 1, 0]
    assert order_worst_first(made_up("swa", 0.5, {}), scores) == [0, 1, 2]


LONG = "captions_of_scenes_drawn_for_the_comparison_of_all_methods_in_spring_2026_v2"


def test_long_names_arrive(tmp_path: Path, offline_wandb: None) -> None:
    config = {**RUN.config, "prompts": {"path": f"{LONG}.txt"}, "model": {"name": "m" * 100}}
    run = replace(RUN, config=config, run="heatkv-" + "0" * 90)
    WandB(images=0, name="second: time").send(tmp_path, run, "s" * 200)
    entry = read_entry(tmp_path)
    assert len(entry.run.tags) == 3
    assert entry.run.tags[1].startswith("captions_of_scenes_drawn_for")
    assert entry.run.tags[1].endswith("spring_2026_v2")
    assert {len(name) for name in (entry.run.tags[1], entry.run.run_id, entry.run.run_group)} == {64}
    assert entry.run.run_id.startswith("second-time-heatkv-0")


@pytest.mark.parametrize(
    ("settings", "mode", "line"),
    [
        ({"project": "a/b"}, "offline", r"logger\.project=a/b: "),
        ({}, "of", r"logger=wandb: WANDB_MODE: Input should be 'online', 'offline'"),
        ({"project": " "}, "offline", r"logger\.project= : must be a name"),
        ({"name": ""}, "offline", r"logger\.name=: must have a letter or digit"),
        ({"images": -1}, "offline", r"images=-1: must be at least 0"),
    ],
)
def test_what_wandb_refuses_is_refused_before_a_run(
    settings: dict[str, Any], mode: str, line: str, offline_wandb: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    WandB().check()
    monkeypatch.setenv("WANDB_MODE", mode)
    with pytest.raises(ConfigError, match=line):
        WandB(**settings).check()
