"""Sweeps in other processes: every job tells what became of it, and what cannot tell is told of."""

import re
import time
from pathlib import Path

import pytest

from kvbench.cli.sweeps.jobs import open_folder, recording
from kvbench.runs.record.sweeps import JobStatus, read_entries
from tests.support.command_line import Command, run_program
from tests.support.kills import read_files

SHORT = ("method=swa", "prompts.count=2", "eval=[psnr]")
DYING = '''
import os, signal

class Dying:
    """Prompts whose reading kills the process, as a machine without memory would."""

    def __init__(self, **_): ...
    def load(self): os.kill(os.getpid(), signal.SIGKILL)
    def load_others(self, count, seed): return []
'''


def sweep(folder: Path, *arguments: str) -> tuple[int, str, list[JobStatus]]:
    """Run a sweep in processes of its own; gives exit status, output and what the jobs left."""
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    done = run_program(folder, "-m", "hydra/launcher=joblib", *SHORT, *arguments)
    [left] = (folder / "runs" / "sweeps").iterdir()
    return done.returncode, done.stdout + done.stderr, read_entries(left)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", ["-m", "task=work", "-m hydra/launcher=joblib", "task=work hydra/launcher=joblib work.workers=2"]
)
def test_jobs_end_in_one_table_and_a_failure_is_tried_again(how: str, tmp_path: Path) -> None:
    """By this process, by a worker, by processes of a launcher, and by its workers."""
    if "joblib" in how:
        pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    words = ("method=full,streaming_llm", "budget=1e-5,0.1,0.2", "prompts.count=2", "eval=[psnr]")
    for _ in range(2 if how == "task=work" else 1):
        done = run_program(tmp_path, *how.split(), *words)
        assert done.returncode == 1, done.stderr
        table = done.stdout[done.stdout.rindex("± half") :]
        rows = [
            line.split()[:2] for line in table.splitlines() if line.strip().startswith(("full", "streaming_"))
        ]
        assert rows == [["full", "1"], ["streaming_llm", "0.1"], ["streaming_llm", "0.2"]]
        [failure] = [line for line in table.splitlines() if line.startswith("failed ")]
        assert failure.startswith("failed streaming_llm 1e-05: ")
        assert "smallest feasible budget is 0.00393" in " ".join(table.split())
        assert "streaming_llm 1e-05  failed: budget=1e-05: 1 sink" in done.stdout
    [folder] = (tmp_path / "runs" / "sweeps").iterdir()
    entries = read_entries(folder)
    assert [entry.outcome for entry in entries] == [*["finished"] * 3, "failed", *["finished"] * 2]
    assert all((tmp_path / str(entry.folder) / "results.json").is_file() for entry in entries if entry.folder)
    assert not (tmp_path / "multirun.yaml").exists()


@pytest.mark.slow
def test_a_killed_process_is_told_of_and_the_same_command_goes_on(tmp_path: Path) -> None:
    (tmp_path / "dying.py").write_text(DYING)
    arguments = ("budget=0.1,0.2", "prompts._target_=dying.Dying")
    status, out, entries = sweep(tmp_path, *arguments)
    assert status == 1
    assert "started" in {entry.outcome for entry in entries} <= {"started", "missing"}
    assert "its process was stopped or killed; run the same command again to resume it" in " ".join(
        out.split()
    )
    alive = DYING.replace("os.kill(os.getpid(), signal.SIGKILL)", "return Scenes(count=2).load()")
    (tmp_path / "dying.py").write_text(f"from kvbench.prompts.scenes import Scenes\n{alive}")
    status, out, entries = sweep(tmp_path, *arguments)
    assert (status, [entry.outcome for entry in entries]) == (0, ["finished", "finished"]), out


def test_only_jobs_that_did_not_finish_start_again(tmp_path: Path) -> None:
    left = open_folder(tmp_path, [("seed=1",)])
    counted = []
    for end in (None, "broken", tmp_path, tmp_path):
        with recording(left, 0, ("seed=1",)) as recorder:
            if end is not None:
                recorder.note_end(end)
        counted += [entry.starts for entry in read_entries(left)]
    assert counted == [1, 2, 3, 3]


def test_only_the_leader_of_a_job_writes_its_entry(tmp_path: Path) -> None:
    left, job, run = open_folder(tmp_path, [("seed=1",)]), ("seed=1",), tmp_path / "run"
    outcomes = []
    with recording(left, 0, job, is_leader=False) as helper:
        outcomes += read_entries(left)
        with recording(left, 0, job) as leader:
            helper.note_end("broken")
            outcomes += read_entries(left)
            leader.note_end(run)
        helper.note_run(run, 4)
    assert [entry.outcome for entry in (*outcomes, *read_entries(left))] == ["missing", "started", "finished"]


def test_a_sweep_without_a_folder_ends_at_once(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    def refuse(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("kvbench.cli.launch.open_folder", refuse)
    assert command("-m", "method=full,swa")[::2] == (1, "error: disk full\n")


SWEEP = ("method=full,swa", "budget=0.2", "prompts.count=1", "eval=[psnr]")


def wait_for_end(folder: Path) -> Path:
    """The sweep's folder, once the background process has printed its table."""
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        for log in folder.glob("runs/sweeps/*/background.log"):
            if "peak %" in log.read_text():
                return log.parent
        time.sleep(0.1)
    raise TimeoutError([path.read_text() for path in folder.glob("runs/sweeps/*/background.log")])


@pytest.mark.slow
@pytest.mark.parametrize("words", [("-m", *SWEEP), ("task=work", *SWEEP)], ids=("jobs", "workers"))
def test_a_sweep_goes_on_in_the_background(words: tuple[str, ...], tmp_path: Path, command: Command) -> None:
    done = run_program(tmp_path, *words, "work.wait=false")
    assert done.returncode == 0, done.stderr
    line = done.stdout.strip().splitlines()[-1]
    told = re.search(r"task=status (work\.folder=(\S+)); .*kill -INT -- -(\d+);", line)
    assert told is not None
    assert not (tmp_path / told[2] / "job-00001.json").is_file()  # it has returned before the end
    folder = wait_for_end(tmp_path)
    assert folder == tmp_path / told[2]
    assert [entry.outcome for entry in read_entries(folder)] == ["finished", "finished"]
    assert "jobs: 2 done, 0 running, 0 failed, 0 missing" in command("task=status", told[1])[1]
    found = read_files(tmp_path / "runs")
    assert command(*words)[0] == 0  # waiting, it finds everything done
    assert read_files(tmp_path / "runs") == found
