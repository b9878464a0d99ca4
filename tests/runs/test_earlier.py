"""Runs that an earlier version wrote are listed, and neither read nor resumed, taken, joined or copied."""

import shutil
from pathlib import Path
from typing import NoReturn

import pytest

import kvbench
from kvbench.cli.sweeps.jobs import open_folder, write_entry
from kvbench.cli.workers.status import show_all, show_status
from kvbench.core.config import ConfigError
from kvbench.dashboard.folders import find_folders
from kvbench.data.frames import runs_df, samples_df
from kvbench.extras.share.publish.dataset import read_published
from kvbench.extras.share.verify.folders import Recorded
from kvbench.extras.share.verify.run import verify_run
from kvbench.extras.share.verify.verdict import Choice
from kvbench.report.collect import collect_runs
from kvbench.runs import execute
from kvbench.runs.record.earlier import EarlierRun, is_earlier
from kvbench.runs.record.merge import merge_runs
from kvbench.runs.record.results import read_results
from kvbench.runs.record.sweeps import JobStatus, read_entries
from tests.support.fake_run import job_in
from tests.support.results import printed

EARLIER = Path(__file__).parents[1] / "golden" / "earlier"
MODEL = "infinity_tiny"
FULL, RANDOM = "full-1f875a0b62", "random-0.1-ba654aedd3"
NAMES = [f"{MODEL}/{FULL}", f"{MODEL}/{RANDOM}"]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A finished run of an earlier version, and its reference without results, as a kill leaves it."""
    shutil.copytree(EARLIER / MODEL, tmp_path / "runs" / MODEL)
    (tmp_path / "runs" / MODEL / FULL / "results.json").unlink()
    return tmp_path / "runs"


def test_they_are_known_by_their_files_and_one_of_this_version_is_none(runs: Path, tmp_path: Path) -> None:
    assert [is_earlier(runs / name) for name in NAMES] == [True, True]
    with pytest.raises(EarlierRun, match=r"ba654aedd3/results.json: of an earlier version, .* run it again"):
        read_results(runs / NAMES[1])
    folder = execute.run(job_in(tmp_path / "new")).folder
    assert not is_earlier(folder)
    (folder / "results.json").unlink()
    assert not is_earlier(folder)


def test_they_are_listed_and_neither_read_nor_merged_nor_verified(
    runs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> NoReturn:
        raise AssertionError("made a job")

    shown = printed(200, show_all, runs)
    assert "runs of an earlier version: 2\n" in shown
    assert all(f"  {runs / name}\n" in shown for name in NAMES)
    assert collect_runs(runs) == []
    assert f"of an earlier version, left out: {', '.join(NAMES)}" in caplog.text
    folders = find_folders(runs)
    assert folders.earlier == tuple(NAMES)
    assert (folders.finished, folders.unfinished, folders.damaged) == ({}, (), ())
    assert len(runs_df(runs)) == len(samples_df(runs)) == 0
    with pytest.raises(ConfigError, match=r"results.json: of an earlier version"):
        read_published([runs / NAMES[1]])
    assert list(merge_runs(runs, tmp_path / "other")) == []
    assert not (tmp_path / "other").exists()
    verdict = verify_run(Recorded(NAMES[1], runs / NAMES[1]), refuse, Choice(2, 0))
    assert verdict.describe() == f"not verifiable here: {NAMES[1]}: run: drawn by an earlier version"


def test_jobs_of_a_sweep_that_it_finished_are_left_to_do(runs: Path) -> None:
    words = ("method=random", "budget=0.1")
    sweep = open_folder(runs, [words])
    write_entry(
        sweep, JobStatus(0, words, "finished", str(runs / NAMES[1]), samples={str(runs / NAMES[1]): 2})
    )
    [entry] = read_entries(sweep)
    assert (entry.outcome, entry.folder, entry.samples) == ("earlier", None, {})
    shown = " ".join(printed(200, show_status, sweep).split())
    assert "0 of an earlier version" in shown
    assert f"{RANDOM} is of an earlier version; run the same command again" in shown
    more = [words, ("method=h2o", "budget=0.1")]
    extended = open_folder(runs, more)  # takes what other sweeps have finished
    assert [entry.outcome for entry in read_entries(extended)] == ["missing", "missing"]


def test_the_same_command_makes_a_run_of_its_own(runs: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    before = {path: path.read_bytes() for path in runs.rglob("*") if path.is_file()}
    again = kvbench.run(
        "random", model=MODEL, budget=0.1, eval="none", runs_dir=str(runs), prompts={"count": 2}
    )
    assert not {again.folder.name, again.results.reference} & {FULL, RANDOM}
    assert "took" not in caplog.text
    assert {path: path.read_bytes() for path in before} == before
    assert [run.run for run in collect_runs(runs)] == [again.results.reference, again.folder.name]
