"""Bounds and later scoring: full against full with other rounding and other seeds; metrics without generating again."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.core.config import ConfigError
from kvbench.methods.full import Full
from kvbench.runs import execute
from tests.runs.test_execute import Broken
from tests.support.fake_run import job_in


def test_the_bounds_are_full_runs_compared_with_the_reference(tmp_path: Path) -> None:
    job = job_in(tmp_path, batch_size=4)
    reference = execute.run(job).results.reference
    rounding, chance = (execute.run(bound) for bound in job.bounds())
    assert rounding.results.method == "full, batch 2"
    assert chance.results.method == "full, seed 1"
    for outcome in (rounding, chance):
        assert outcome.results.reference == reference
        assert outcome.results.memory.peak_tokens == outcome.results.memory.full_tokens
    floor, other = (outcome.results.metrics["psnr"] for outcome in (rounding, chance))
    assert all(outcome.results.metrics["psnr_mean_mse"].n == 10 for outcome in (rounding, chance))
    assert floor.value is None or floor.value > 50  # identical images have no PSNR
    assert other.value < 30


def test_a_bound_is_no_reference_and_is_made_once(tmp_path: Path) -> None:
    job = job_in(tmp_path, method=Full())
    bounds = job.bounds()
    folders = {execute.run(one).folder for one in (job, *bounds)}
    assert len(folders) == 3
    seeded = execute.run(replace(job, settings=replace(job.settings, seed=1)))  # the plain run with that seed
    assert seeded.folder not in folders
    assert all(execute.run(one).reused for one in bounds)


def test_a_batch_of_one_is_bounded_by_one_of_two(tmp_path: Path) -> None:
    assert [bound.settings.batch_size for bound in job_in(tmp_path, batch_size=1).bounds()] == [2, 1]


def test_metrics_are_added_without_generating_again(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    execute.run(job)
    more = job_in(tmp_path, evaluators={**job.evaluators, "broken": Broken(works=True)})
    outcome = execute.rescore(more)
    assert more.model.batches == []
    assert outcome.results.metrics["broken"].value == 1.0
    assert outcome.results.metrics["psnr"].value is not None


def test_scoring_wants_a_finished_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a finished run; generate it with task=run"):
        execute.rescore(job_in(tmp_path))
    execute.run(job_in(tmp_path, method=Full()))
    with pytest.raises(ConfigError, match=r"streaming_llm-0\.5-\w+ is not a finished run"):
        execute.rescore(job_in(tmp_path))
