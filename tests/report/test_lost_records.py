"""A finished run that lost records is not taken for one of all of its samples, whoever reads it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbench.cli.api import Run
from kvbench.core.config import ConfigError
from kvbench.dashboard.datasets import read_dataset
from kvbench.data.frames import export_frames
from kvbench.data.publication import write_file_list
from kvbench.extras.share.publish.dataset import prepare_dataset, read_published
from kvbench.report.collect import collect_runs
from kvbench.runs import execute
from kvbench.runs.record.merge import merge_runs
from tests.support.fake_run import job_in


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return execute.run(job_in(tmp_path / "runs", count=3)).folder


def merge(run: Path) -> None:
    """Raise the problem of the run, of which nothing is written."""
    target = run.parents[2] / "target"
    [problem] = [one.problem for one in merge_runs(run.parents[1], target) if one.problem is not None]
    assert [path.parent.name for path in target.rglob("results.json")] == [
        path.name for path in run.parent.glob("full-*")
    ]
    raise ConfigError(problem)


def show(run: Path) -> None:
    """Read a dataset that was published whole, whose author then lists the files of the damaged run."""
    shutil.copyfile(run / "samples.jsonl", run.parents[2] / f"set/runs/fake/{run.name}/samples.jsonl")
    (run.parents[2] / "set/SHA256SUMS").unlink()
    write_file_list(run.parents[2] / "set")
    read_dataset(run.parents[2] / "set")


DOORS: dict[str, Callable[[Path], object]] = {
    "merge": merge,
    "publish": lambda run: read_published([run]),
    "export": lambda run: export_frames(run.parents[1], "csv", run.parents[2]),
    "api": Run.read,
    "dashboard": show,
}
LINES = {"0,2": 2, "0,0,2": 2, "0,1,2,3": 4, "": 0}
"""Indices of the records that a damaged file has, and their number."""


@pytest.mark.parametrize("door", DOORS)
def test_records_are_counted(run: Path, door: str, caplog: pytest.LogCaptureFixture) -> None:
    prepare_dataset(read_published([run]), run.parents[2] / "set")
    records = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    (run / "images/000001.png").unlink()
    for indices, count in LINES.items():
        chosen = [int(index) for index in indices.split(",") if index]
        lines = [json.dumps({**records[index % 3], "index": index}) + "\n" for index in chosen]
        (run / "samples.jsonl").write_text("".join(lines))
        problem = rf"samples\.jsonl: has {count} records, results\.json has n = 3; start the run again"
        with pytest.raises(ValueError, match=problem):
            DOORS[door](run)
    assert [one.method for one in collect_runs(run.parents[1])] == ["full"]
    assert f"left out: {run}/samples.jsonl: has 0 records" in caplog.text
