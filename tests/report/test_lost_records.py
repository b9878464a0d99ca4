"""A finished run that lost records is not taken for one of all of its samples, whoever reads it."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbench.cli.api import Run
from kvbench.core.config import ConfigError
from kvbench.data.frames import export_frames
from kvbench.leaderboard.datasets import read_dataset
from kvbench.report.collect import collect_runs
from kvbench.report.dataset import prepare_dataset, read_published
from kvbench.report.publication import write_file_list
from kvbench.runs import execute
from kvbench.runs.record.merge import merge_runs
from kvbench.runs.record.results import read_results
from tests.support.fake_run import count_records, job_in

PROBLEM = "samples.jsonl: has {} records, results.json has n = 3; start the run again"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return execute.run(job_in(tmp_path_factory.mktemp("runs"), count=3)).folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished.parents[1], tmp_path / "runs")
    return tmp_path / "runs/fake" / finished.name


def lose_record(run: Path) -> int:
    lines = (run / "samples.jsonl").read_text().splitlines(keepends=True)
    (run / "samples.jsonl").write_text(lines[0] + lines[2])
    (run / "images/000001.png").unlink()
    return 2


def repeat_record(run: Path) -> int:
    """A line twice in the place of another: as many lines as samples."""
    lines = (run / "samples.jsonl").read_text().splitlines(keepends=True)
    (run / "samples.jsonl").write_text(lines[0] + lines[0] + lines[2])
    (run / "images/000001.png").unlink()
    return 2


def add_record(run: Path) -> int:
    record = json.loads((run / "samples.jsonl").read_text().splitlines()[0])
    with (run / "samples.jsonl").open("a") as file:
        file.write(json.dumps({**record, "index": 3}) + "\n")
    shutil.copyfile(run / "images/000000.png", run / "images/000003.png")
    return 4


def lose_all(run: Path) -> int:
    (run / "samples.jsonl").unlink()
    return 0


def merge(run: Path) -> str:
    """The reference is merged, nothing is written of the run."""
    target = run.parents[1].with_name("target")
    merged = {one.name: one for one in merge_runs(run.parents[1], target)}
    assert merged.keys() == {f"fake/{path.name}" for path in run.parent.glob("*-*/")}
    assert [path.parent for path in target.rglob("results.json")] == [
        target / name for name, one in merged.items() if one.problem is None
    ]
    assert not (target / "fake" / run.name).exists()
    return str(merged[f"fake/{run.name}"].problem)


def refuse(read: Callable[[Path], object]) -> Callable[[Path], str]:
    def line(run: Path) -> str:
        with pytest.raises(ConfigError) as refused:
            read(run)
        return str(refused.value)

    return line


DOORS: dict[str, Callable[[Path], str]] = {
    "merge": merge,
    "publish": refuse(lambda run: read_published([run])),
    "export": refuse(lambda run: export_frames(run.parents[1], "csv", run.parents[2])),
    "api": refuse(Run.read),
}


@pytest.mark.parametrize("damage", [lose_record, repeat_record, add_record, lose_all])
@pytest.mark.parametrize("door", DOORS)
def test_records_are_counted(run: Path, door: str, damage: Callable[[Path], int]) -> None:
    count = damage(run)
    assert PROBLEM.format(count) in DOORS[door](run)


def test_a_report_leaves_the_run_out(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert len(collect_runs(run.parents[1])) == 2
    lose_record(run)
    assert [one.method for one in collect_runs(run.parents[1])] == ["full"]
    [line] = [one.message for one in caplog.records if one.levelno == logging.WARNING]
    assert line.startswith(f"left out: {run}/{PROBLEM.format(2)}")


def test_a_dataset_without_a_record_is_not_ranked(run: Path, tmp_path: Path) -> None:
    """Its author lists the files anew, so that the dataset agrees with itself."""
    prepare_dataset(read_published([run]), tmp_path / "set")
    read_dataset(tmp_path / "set")
    records = tmp_path / "set/runs/fake" / run.name / "samples.jsonl"
    records.write_text("".join(records.read_text().splitlines(keepends=True)[:2]))
    (tmp_path / "set/SHA256SUMS").unlink()
    write_file_list(tmp_path / "set")
    with pytest.raises(ConfigError, match=r"has 2 records, results\.json has n = 3"):
        read_dataset(tmp_path / "set")


def test_the_run_itself_draws_what_is_missing(run: Path) -> None:
    whole = read_results(run)
    lose_record(run)
    again = execute.run(job_in(run.parents[1], count=3))
    assert again.results is not None
    assert whole is not None
    assert again.results.metrics == whole.metrics
    assert count_records(run) == 3
    assert Run.read(run).results == again.results
