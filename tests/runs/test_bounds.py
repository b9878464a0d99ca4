"""Bounds and later scoring: full against full with other rounding and other seeds; scores of finished runs alone."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.core.config import ConfigError
from kvbench.methods.full import Full
from kvbench.runs import execute
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
