"""Verbs of a sweep and hosts on which runs break, between two blocks of running workers."""

import errno
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvbench.cli.sweeps.jobs import open_folder, write_entry
from kvbench.cli.sweeps.outcomes import list_failures
from kvbench.cli.workers import work
from kvbench.cli.workers.control import HELD, blames_host, control, read_hold, read_stopped_hosts, stop_host
from kvbench.core.config import ConfigError
from kvbench.models.infinity.model import InfinityModel
from kvbench.runs.record.merge import PROMPT_LISTS
from kvbench.runs.record.sweeps import JobStatus, read_entries
from tests.support.command_line import Command

JOBS = [("method=swa", "budget=0.2"), ("method=swa", "budget=0.3"), ("method=random", "budget=0.2")]

OnPause = Callable[[Callable[[], object]], None]
RunWorker = Callable[..., tuple[int, str, list[int]]]
"""Runs a worker on a folder's jobs; gives exit status, what was printed and the numbers of jobs as they were tried."""


@pytest.fixture
def run_worker(command: Command, monkeypatch: pytest.MonkeyPatch) -> RunWorker:
    def run(folder: Path, do: Callable[[int], object], host: str = "node0") -> tuple[int, str, list[int]]:
        jobs, tried = [entry.overrides for entry in read_entries(folder)], list[int]()

        def do_job(overrides: tuple[str, ...], *_: object, **__: object) -> object:
            tried.append(jobs.index(overrides))
            return do(tried[-1])

        monkeypatch.setattr(work, "gethostname", lambda: host)
        monkeypatch.setattr(work, "do_job", do_job)
        status, out, err = command("task=work", f"work.folder={folder}", "eval=none")
        return status, out + err, tried

    return run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return open_folder(tmp_path / "runs", JOBS)


@pytest.fixture
def on_pause(monkeypatch: pytest.MonkeyPatch) -> OnPause:
    """Has something done whenever a worker that is paused would sleep."""
    sleep = time.sleep

    def use(action: Callable[[], object]) -> None:
        monkeypatch.setattr(work, "PAUSED_INTERVAL", 12345.0)
        monkeypatch.setattr(
            time, "sleep", lambda pause: action() if pause == work.PAUSED_INTERVAL else sleep(pause)
        )

    return use


def outcomes(folder: Path) -> list[str]:
    return [entry.outcome for entry in read_entries(folder)]


def test_a_verb_is_one_command_that_prints_one_line(command: Command, folder: Path) -> None:
    said = f"{folder}: paused: workers stop after their blocks; resume with work.do=resume\n"
    assert command("task=work", f"work.folder={folder}", "work.do=pause") == (0, said, "")
    status, out, _ = command("task=work", f"work.folder={folder}", "work.do=drop", "work.run='budget=0.3'")
    assert (status, out.startswith(f"{folder}: dropped 1 run (method=swa budget=0.3); ")) == (0, True)


def test_verbs_say_what_they_did(folder: Path) -> None:
    def do(*words: str) -> str:
        return control(folder, *words).removeprefix(f"{folder}: ")

    write_entry(folder, JobStatus(1, JOBS[1], "failed", error="e"))
    assert do("pause").startswith("paused: ")
    assert do("pause").startswith("is paused already")
    assert read_hold(folder) == "pause"
    assert do("resume") == "resumed"
    assert do("resume") == "is not paused"
    assert do("drop", "method=random").startswith("dropped 1 run (method=random budget=0.2); ")
    assert outcomes(folder) == ["missing", "failed", "dropped"]
    assert do("requeue") == "requeued 1 run (method=swa budget=0.3)"
    assert do("requeue") == "requeued nothing: no run failed"
    assert do("requeue", "method=random").startswith("requeued 1 run (method=random")
    assert outcomes(folder) == ["missing"] * 3


def test_a_verb_begins_no_sweep(command: Command, folder: Path, tmp_path: Path) -> None:
    told = command("task=work", "method=full,swa", "work.do=pause")[2]
    assert "no sweep with these overrides was started" in told
    assert len(list(tmp_path.glob("runs/sweeps/*"))) == 1
    told = command("task=work", "method=full", "runs_dir=none", "work.do=pause")[2]
    assert told.startswith("error: runs_dir=none")


def test_runs_are_named_by_number_folder_or_words(folder: Path) -> None:
    write_entry(
        folder, JobStatus(0, JOBS[0], "started", samples={"runs/m/swa-0.2-ab": 2, "runs/m/full-cd": 2})
    )
    named = {2: [2], "swa-0.2-ab": [0], "method=swa": [0, 1], "budget=0.2 method=swa": [0]}
    for run, dropped in named.items():
        control(folder, "drop", run)
        assert [entry.number for entry in read_entries(folder) if entry.outcome == "dropped"] == dropped
        control(folder, "requeue", run)
    assert read_entries(folder)[0].outcome == "started"  # a run that did not fail keeps what is known of it
    with pytest.raises(ConfigError, match=r"work\.run=full-cd"):
        control(folder, "drop", "full-cd")


def test_a_paused_sweep_waits(folder: Path, run_worker: RunWorker, on_pause: OnPause) -> None:
    seen: list[list[str]] = []

    def resume() -> None:
        seen.append(outcomes(folder))
        control(folder, "resume")

    def do(number: int) -> Path:
        if number == 0:
            control(folder, "pause")
        return folder

    on_pause(resume)
    assert run_worker(folder, do)[2] == [0, 1, 2]
    assert seen == [["finished", "missing", "missing"]]


def test_stopped_workers_end_after_their_block(folder: Path, run_worker: RunWorker) -> None:
    def stop(_: int) -> Path:
        control(folder, "stop")
        os.utime(folder / HELD, (2**32, 2**32))  # after the worker began, whatever the grain of the clock
        return folder

    assert run_worker(folder, stop)[2] == [0]
    assert outcomes(folder) == ["finished", "missing", "missing"]
    os.utime(folder / HELD, (1, 1))  # before the next one
    assert sorted(run_worker(folder, lambda _: folder)[2]) == [0, 1, 2]


def test_a_paused_worker_ends(folder: Path, run_worker: RunWorker, on_pause: OnPause) -> None:
    on_pause(lambda: control(folder, "stop"))
    assert run_worker(folder, lambda _: control(folder, "pause") and folder)[2] == [0]


def test_a_dropped_run_is_left_out_of_work_and_table(
    folder: Path, run_worker: RunWorker, command: Command
) -> None:
    assert run_worker(folder, lambda number: control(folder, "drop", 1) and folder)[2] == [0, 2]
    assert outcomes(folder) == ["finished", "dropped", "finished"]
    status, out, _ = command("task=work", f"work.folder={folder}")
    assert (status, "failed" in out) == (0, False)


def test_a_failed_run_is_tried_again(folder: Path, run_worker: RunWorker) -> None:
    def do(number: int) -> Path:
        if not tried:
            tried.append(number)
            raise ValueError("not yet")
        if number == 2:
            control(folder, "requeue")
        return folder

    tried: list[int] = []
    assert run_worker(folder, do)[2] == [0, 1, 2, 0]
    assert outcomes(folder) == ["finished"] * 3


def test_a_run_is_paused_between_two_blocks_and_holds_no_claim(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_pause: OnPause
) -> None:
    generate = InfinityModel.generate
    claims: list[list[str]] = []
    batches: list[object] = []

    def pause_once(*arguments: object) -> object:
        [sweep] = (tmp_path / "runs/sweeps").iterdir()
        batches.append(arguments[1])
        if len(batches) == 2:
            control(sweep, "pause")
        return generate(*arguments)  # type: ignore[arg-type]

    def resume() -> None:
        [sweep] = (tmp_path / "runs/sweeps").iterdir()
        hidden = [path.name for path in tmp_path.rglob(".*") if path.parent.name != "workers"]
        claims.append([name for name in hidden if name != PROMPT_LISTS])
        control(sweep, "resume")

    monkeypatch.setattr(InfinityModel, "generate", pause_once)
    on_pause(resume)
    assert command("task=work", "method=full", "prompts.count=3", "batch_size=1", "eval=none")[0] == 0
    assert claims == [[]]
    assert len(batches) == 3
    [records] = tmp_path.glob("runs/*/full-*/samples.jsonl")
    assert len(records.read_text().splitlines()) == 3


SEEDS = [(f"seed={seed}",) for seed in range(4)]


@pytest.fixture
def seeds(tmp_path: Path) -> Path:
    return open_folder(tmp_path / "runs", SEEDS)


def break_down(number: int) -> object:
    raise RuntimeError(f"CUDA error {number}: unspecified launch failure")


def test_a_host_is_stopped_after_two_runs_and_another_one_does_them(
    seeds: Path, run_worker: RunWorker, command: Command
) -> None:
    status, out, _ = run_worker(seeds, break_down, "node7")
    assert status == 1
    reason = "RuntimeError: CUDA error 1: unspecified launch failure"
    said = f"host node7 is stopped: 2 runs in a row failed there, the last with {reason}; "
    assert out.splitlines()[-1].startswith(f"error: {said}")
    assert json.loads((seeds / "hosts/node7.json").read_text()) == {"reason": reason}
    entries = read_entries(seeds)
    assert [entry.outcome for entry in entries] == ["missing"] * 4
    assert list_failures(seeds, entries)[1] == ("missing seed=1", reason)
    assert said in command("task=status", f"work.folder={seeds}")[1]
    again = run_worker(seeds, lambda _: seeds, "node7")[1]
    assert again.splitlines()[-1].startswith(f"error: {said}")
    assert run_worker(seeds, lambda _: seeds, "node8")[0] == 0
    assert [entry.outcome for entry in read_entries(seeds)] == ["finished"] * 4
    assert control(seeds, "requeue").endswith("requeued nothing: no run failed; hosts readmitted: node7")
    assert run_worker(seeds, lambda _: seeds, "node7")[0] == 0


def test_a_worker_that_runs_does_what_a_stopped_host_gave_back(seeds: Path, run_worker: RunWorker) -> None:
    def do(number: int) -> Path:
        if number == 3:
            write_entry(seeds, JobStatus(1, SEEDS[1], "failed", error="broken"))
            stop_host(seeds, "node7", "broken", [(1, SEEDS[1]), (2, SEEDS[2])])
        return seeds

    status, _, tried = run_worker(seeds, do, "node8")
    assert (status, tried) == (0, [0, 1, 2, 3, 1])


def test_a_run_that_finishes_between_two_that_break_clears_the_host(
    seeds: Path, run_worker: RunWorker
) -> None:
    def do(number: int) -> object:
        return seeds if number % 2 else break_down(number)

    assert run_worker(seeds, do, "node7")[0] == 1
    assert [entry.outcome for entry in read_entries(seeds)] == ["failed", "finished"] * 2
    assert read_stopped_hosts(seeds) == {}


def test_bad_settings_are_no_fault_of_a_host(seeds: Path, run_worker: RunWorker) -> None:
    def do(number: int) -> object:
        raise ConfigError("budget=1e-05: too small")

    assert run_worker(seeds, do, "node7")[0] == 1
    assert [entry.outcome for entry in read_entries(seeds)] == ["failed"] * 4
    assert read_stopped_hosts(seeds) == {}
    assert not blames_host(FileNotFoundError(errno.ENOENT, "no weights"))
    assert blames_host(OSError(errno.ENOSPC, "full"))
    assert blames_host(torch.OutOfMemoryError("Tried to allocate 2 GiB"))
