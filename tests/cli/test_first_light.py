"""First light: a sweep per model that is checked and timed first, and ends with published numbers and a dataset."""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import cast

import hydra
import pytest

from kvbench.cli.config.command import Command as Words
from kvbench.cli.config.compose import compose_job, hydra_of_kvbench, read_settings
from kvbench.cli.config.instantiate import instantiate
from kvbench.cli.sweeps.sweeper import split_jobs
from kvbench.cli.tasks.expected import FIGURES, expect_time
from kvbench.report.papers.published import find, model_of
from kvbench.runs.job import Job
from tests.support.command_line import Command, run_program
from tests.support.marks import slow_except
from tests.support.places import ROOT

MODELS = sorted(path.stem for path in (ROOT / "conf" / "sweeps" / "first_light").glob("*.yaml"))


@pytest.mark.parametrize("model", slow_except(lambda model: model == "var_tiny", MODELS))
def test_every_job_composes_and_big_models_have_published_numbers(model: str) -> None:
    words = Words.parse(["-m", "sweeps=first_light", f"model={model}"]).overrides
    assert words[0] == f"sweeps=first_light/{model}"
    with hydra_of_kvbench():
        cfg = hydra.compose("config", overrides=list(words), return_hydra_config=True)
        jobs = [compose_job(list(job))[0] for job in split_jobs(cfg.hydra.sweeper.params, words)]
        settings = [read_settings(job) for job in jobs]
    assert [one.task for one in settings] == [*["run"] * 3, *["profile"] * 2]
    assert {job.model.name for job in jobs} == {model}
    assert {job.prompts.count * job.prompts.get("per_prompt", 1) for job in jobs} == {64}
    assert cfg.sweep.pack == f"published/first_light-{model}"
    own = {model_of(label) for name in cfg.published for label in find(name).models}
    assert model in own or model.endswith("_tiny")


def test_figures_are_those_of_the_page() -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    printed = {
        "infinity_2b": re.search(r"\| `full` \| ([\d.]+) \| 1.00 \| 32.3 \|", page),
        "llamagen_xl": re.search(r"(\d+) tokens/s with CUDA graphs", page),
        "infinity_tiny": re.search(r"\| `full` \| ([\d.]+) \| 1.000 \|", page),
        "llamagen_tiny": re.search(r"\| `full` \| [\d.]+ \| \d+ \| [\d.]+ \| ([\d.]+) \|", page),
    }
    numbers = {name: float(found[1]) for name, found in printed.items() if found}
    assert {one.model: one.seconds for one in FIGURES.values()} == pytest.approx({
        "infinity_2b": numbers["infinity_2b"], "llamagen_xl": 24 * 24 / numbers["llamagen_xl"],
        "infinity_tiny": numbers["infinity_tiny"] / 1000, "llamagen_tiny": numbers["llamagen_tiny"] / 8,
    })  # fmt: skip


def make_job(model: str, device: str) -> Job:
    cfg, _ = compose_job([f"model={model}"])
    chosen = replace(read_settings(cfg), device=device)
    return cast(Job, type("", (), {"model": instantiate(cfg.model), "settings": chosen}))


def test_another_model_takes_the_time_of_its_parameters_and_tokens() -> None:
    with hydra_of_kvbench():
        expected = expect_time(make_job("var_tiny", "cpu"), [])
    assert expected.scaled
    assert "infinity_tiny" in expected.source
    # docs/models.md: 3.68 and 5.85 million parameters; both have 399 tokens in two sequences.
    assert expected.seconds == pytest.approx(33.14e-3 * 3.68 / 5.85, rel=2e-3)


def test_on_another_card_the_time_follows_the_floors_of_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    names = iter(("NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA T4"))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: next(names))
    with hydra_of_kvbench():
        job = make_job("llamagen_xl", "cuda")
        measured, other, unknown = (expect_time(job, []) for _ in range(3))
    assert not measured.scaled
    assert unknown == measured
    assert other.source.endswith("by the floors of task=plan on H100 SXM")
    # Both compute as fast, and 97 % of the floor are reads of memory, at 4800 and 3350 GB/s.
    assert other.seconds / measured.seconds == pytest.approx(4800 / 3350, rel=0.02)


@pytest.mark.slow
def test_it_runs_from_the_check_to_a_dataset_that_others_verify(tmp_path: Path, command: Command) -> None:
    words = ("-m", "sweeps=first_light", "model=infinity_tiny", "prompts.count=2", "profile.repeats=1")
    done = run_program(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    for told in (
        "sha256 7dec6245314d",
        "about ",
        "published / yours",
        "0.684 (heatkv_table2)",
        "left out: fid_paired",
    ):
        assert told in done.stdout
    assert done.stdout.index("docs/performance.md") < done.stdout.index("geneval[scenes]")
    shutil.copytree(tmp_path / "published", tmp_path / "elsewhere")
    status, out, err = command(
        "verify", f"{tmp_path}/elsewhere/first_light-infinity_tiny", "samples=1", "seed=5"
    )
    assert (status, out.count("verified: "), err) == (0, 4, "")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs" / "profile").iterdir()}
    again = run_program(tmp_path, *words)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs" / "profile").iterdir()} == before
    assert "5 of 5 jobs found finished" in again.stdout
    assert "docs/performance.md" not in again.stdout  # what is finished is not checked


@pytest.mark.slow
def test_a_job_that_cannot_start_stops_the_sweep_before_the_first(tmp_path: Path) -> None:
    words = ("-m", "sweeps=first_light", "model=infinity_tiny", "budget=1e-9", "prompts.count=2")
    done = run_program(tmp_path, *words)
    assert done.returncode == 1
    assert "task=check: the run cannot start: method, prompts" in done.stderr
    assert not (tmp_path / "runs").exists()
