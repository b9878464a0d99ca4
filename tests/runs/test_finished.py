"""Finished runs: bounds of a reference, later scoring, and folders that cannot be written."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.cli.config import checks
from kvbench.cli.config.checks import check_runs_dir
from kvbench.core.config import ConfigError
from kvbench.eval.files.samples import SampleSetError
from kvbench.eval.paired.ssim import Ssim
from kvbench.methods.full import Full
from kvbench.runs import execute
from kvbench.runs.record.results import read_results
from tests.support.fake_run import job_in


def test_the_bounds_are_full_runs_compared_with_the_reference(tmp_path: Path) -> None:
    job = job_in(tmp_path, batch_size=4)
    reference = execute.run(job).results.reference
    rounding, chance = (execute.run(bound) for bound in job.bounds())
    assert [outcome.results.method for outcome in (rounding, chance)] == ["full, batch 2", "full, seed 1"]
    for outcome in (rounding, chance):
        assert outcome.results.reference == reference
        assert outcome.results.memory.peak_tokens == outcome.results.memory.full_tokens
        assert outcome.results.metrics["psnr_mean_mse"].n == 10
    floor, other = (outcome.results.metrics["psnr"] for outcome in (rounding, chance))
    assert floor.value is None or floor.value > 50  # identical images have no PSNR
    assert other.value < 30
    full = replace(job.reference, settings=replace(job.reference.settings, seed=1))
    assert execute.run(full).folder not in (rounding.folder, chance.folder)  # a plain run with that seed
    assert all(execute.run(bound).reused for bound in job_in(tmp_path, batch_size=4, method=Full()).bounds())
    assert [bound.settings.batch_size for bound in job_in(tmp_path, batch_size=1).bounds()] == [2, 1]


def test_scoring_wants_a_finished_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a finished run; generate it with task=run"):
        execute.rescore(job_in(tmp_path))
    execute.run(job_in(tmp_path, method=Full()))
    with pytest.raises(ConfigError, match=r"streaming_llm-0\.5-\w+ is not a finished run"):
        execute.rescore(job_in(tmp_path))


def test_a_finished_run_is_read_where_nothing_can_be_written(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(whole.parents[1], tmp_path / "runs")
    for module in (checks, execute):
        monkeypatch.setattr(module, "find_obstacle", lambda _: "read-only")
    job, folder = job_in(tmp_path / "runs"), tmp_path / "runs/fake" / whole.name
    check_runs_dir(job.settings, alone=True)
    with pytest.raises(ConfigError, match=r"^runs_dir=.*: cannot be written \(read-only\)$"):
        check_runs_dir(job.settings)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for finished in (job, job_in(tmp_path / "runs", method=Full(), budget=1)):
        outcome = execute.run(finished)
        assert outcome.reused
        assert outcome.results == read_results(outcome.folder)
    unfinished = "cannot be written (read-only), and the run is not finished in it"
    for other in (job_in(tmp_path / "runs", seed=1), job_in(tmp_path / "runs", evaluators={"ssim": Ssim()})):
        with pytest.raises(ConfigError, match=re.escape(unfinished)):
            execute.run(other)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    (folder / "images/000001.png").write_bytes(b"torn")
    with pytest.raises(SampleSetError, match=r"000001\.png is not the recorded file"):
        execute.run(job)
