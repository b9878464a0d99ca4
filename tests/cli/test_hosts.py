"""Hosts on which runs break: they are stopped and named, and others go on."""

import errno
import json
from pathlib import Path

import pytest
import torch

from kvbench.cli.sweeps.jobs import Entry, open_folder, read_entries, write_entry
from kvbench.cli.sweeps.outcomes import list_failures
from kvbench.cli.workers.control import blames_host, control, read_stopped_hosts, stop_host
from kvbench.core.config import ConfigError
from tests.cli.conftest import RunWorker
from tests.support.command_line import Command

JOBS = [(f"seed={seed}",) for seed in range(4)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return open_folder(tmp_path / "runs", JOBS)


def break_down(number: int) -> object:
    raise RuntimeError(f"CUDA error {number}: unspecified launch failure")


def test_a_host_is_stopped_after_two_runs_and_another_one_does_them(
    folder: Path, run_worker: RunWorker, command: Command
) -> None:
    status, out, _ = run_worker(folder, break_down, "node7")
    assert status == 1
    reason = "RuntimeError: CUDA error 1: unspecified launch failure"
    said = f"host node7 is stopped: 2 runs in a row failed there, the last with {reason}; "
    assert out.splitlines()[-1].startswith(f"error: {said}")
    assert json.loads((folder / "hosts/node7.json").read_text()) == {"reason": reason}
    entries = read_entries(folder)
    assert [entry.outcome for entry in entries] == ["missing"] * 4
    assert list_failures(entries)[1] == ("seed=1", reason)
    assert said in command("task=status", f"work.folder={folder}")[1]
    again = run_worker(folder, lambda _: folder, "node7")[1]
    assert again.splitlines()[-1].startswith(f"error: {said}")
    assert run_worker(folder, lambda _: folder, "node8")[0] == 0
    assert [entry.outcome for entry in read_entries(folder)] == ["finished"] * 4
    assert control(folder, "requeue").endswith("requeued nothing: no run failed; hosts readmitted: node7")
    assert run_worker(folder, lambda _: folder, "node7")[0] == 0


def test_a_worker_that_runs_does_what_a_stopped_host_gave_back(folder: Path, run_worker: RunWorker) -> None:
    def do(number: int) -> Path:
        if number == 3:
            write_entry(folder, Entry(1, JOBS[1], "failed", error="broken"))
            stop_host(folder, "node7", "broken", [(1, JOBS[1]), (2, JOBS[2])])
        return folder

    status, _, tried = run_worker(folder, do, "node8")
    assert (status, tried) == (0, [0, 1, 2, 3, 1])


def test_a_run_that_finishes_between_two_that_break_clears_the_host(
    folder: Path, run_worker: RunWorker
) -> None:
    def do(number: int) -> object:
        return folder if number % 2 else break_down(number)

    assert run_worker(folder, do, "node7")[0] == 1
    assert [entry.outcome for entry in read_entries(folder)] == ["failed", "finished"] * 2
    assert read_stopped_hosts(folder) == {}


def test_bad_settings_are_no_fault_of_a_host(folder: Path, run_worker: RunWorker) -> None:
    def do(number: int) -> object:
        raise ConfigError("budget=1e-05: too small")

    assert run_worker(folder, do, "node7")[0] == 1
    assert [entry.outcome for entry in read_entries(folder)] == ["failed"] * 4
    assert read_stopped_hosts(folder) == {}
    assert not blames_host(FileNotFoundError(errno.ENOENT, "no weights"))
    assert blames_host(OSError(errno.ENOSPC, "full"))
    assert blames_host(torch.OutOfMemoryError("Tried to allocate 2 GiB"))
