"""Sweeps of speed: their jobs are the rows of the published tables; one runs on a CPU and prints them."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra
import pytest
from omegaconf import DictConfig

from kvbench.cli.config.compose import compose_job, hydra_of_kvbench, read_settings, read_values
from kvbench.cli.config.instantiate import instantiate
from kvbench.cli.sweeps.sweeper import split_jobs
from kvbench.report.papers.published import PublishedTable, find, model_of
from kvbench.report.papers.speed import MEASURES
from tests.support.command_line import Command
from tests.support.places import ROOT
from tests.support.results import make_timing

SWEEPS = sorted(path.stem for path in (ROOT / "conf" / "sweeps" / "speed").glob("*.yaml"))
PUBLISHED_MODELS = ("llamagen_xl", "janus_pro_7b", "lumina_mgpt_7b_768", "var_d30", "infinity_2b", "qwen3_8b")
REAL = [name for name in SWEEPS if name.endswith(PUBLISHED_MODELS)]
"""Sweeps of the papers' models."""


@pytest.fixture(autouse=True)
def checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def compose_jobs(name: str) -> tuple[DictConfig, list[tuple[str, DictConfig]]]:
    """What a sweep's jobs share, and each job with the name of its method."""
    found = []
    with hydra_of_kvbench():
        cfg = hydra.compose("config", overrides=[f"sweeps=speed/{name}"], return_hydra_config=True)
        for words in split_jobs(cfg.hydra.sweeper.params, [f"sweeps=speed/{name}"]):
            job, _ = compose_job([word for word in words if word != "cuda_graph=True"])  # an error on a CPU
            read_settings(job)
            if "cuda_graph=True" in words:
                job.cuda_graph = True
            found.append((next(word[7:] for word in words if word.startswith("method=")), job))
    return cfg, found


def list_rows(
    table: PublishedTable, jobs: Sequence[tuple[str, DictConfig]]
) -> list[Mapping[str, tuple[str, ...]]]:
    """The rows of a published table that jobs match, with their own batch sizes."""
    rows = []
    for method, job in jobs:
        values: Any = dict(read_values(job))
        spec = instantiate(job.model).spec
        share = job.budget if job.budget <= 1 else job.budget * spec.all_heads / spec.full_tokens
        for batch in job.profile.batch_sizes:
            one = make_timing(method, share, model=job.model.name, batch=batch, config=values)
            one.profile["provenance"]["cuda_graph"] = "on" if job.cuda_graph is True else "off"
            rows += [table.rows[place] for place in table.find_rows(one)]
            if job.profile.against_full:
                other = make_timing("full", 1.0, model=job.model.name, batch=batch)
                rows += [table.rows[place] for place in table.find_rows(other)]
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_jobs_are_the_published_rows_of_their_model(name: str) -> None:
    cfg, jobs = compose_jobs(name)
    assert all(job.model.weights == "random" for _, job in jobs)
    [model] = {job.model.name for _, job in jobs}
    table = find(cfg.published)
    found = list_rows(table, jobs)
    wanted = [
        row.where
        for label, rows in table.models.items()
        if model_of(label) == model
        for row in rows
        if any(row.cells[metric] for metric in table.metrics if metric in MEASURES and metric != "saving %")
    ]
    assert wanted
    assert all(where in found for where in wanted)


def test_the_page_names_every_sweep() -> None:
    page = (ROOT / "docs" / "tables.md").read_text()
    assert sorted(set(re.findall(r"sweeps=speed/(\w+)", page))) == SWEEPS


def test_a_sweep_ends_with_published_beside_measured_and_a_report_prints_it_again(
    command: Command, tmp_path: Path
) -> None:
    words = ("sweeps=speed/heatkv_fig5", "device=cpu", "profile.batch_sizes=[2]", "profile.repeats=1")
    words = (*words, "method=heatkv", "profile.warmup=0")
    status, out, err = command(*words)
    assert (status, err) == (0, err)
    [written] = tmp_path.glob("runs/report-speed-*.md")
    heatkv = next(line for line in written.read_text().splitlines() if line.startswith("| heatkv"))
    cells = [cell.strip() for cell in heatkv.strip("|").split("|")]
    assert (cells[:3], cells[4]) == (["heatkv", "0.1", "2"], "matches")
    assert float(cells[3]) > 0
    assert "n/a: a CPU has no allocator" in written.read_text()
    assert len(list(tmp_path.glob("runs/profile/*.json"))) == 1
    hint = out.partition("these tables again: ")[2].split()
    assert hint[-1] == "published=heatkv_fig5_speed"
    status, again, _ = command(*hint)
    assert status == 0
    assert [line for line in again.splitlines() if "matches" in line] == [
        line for line in out.splitlines() if "matches" in line
    ]
    [file] = tmp_path.glob("runs/profile/*.json")
    file.unlink()
    status, _, err = command("task=report", *words)
    assert status == 1
    assert "not a file of task=profile" in err
