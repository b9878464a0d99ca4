"""SIGTERM and the start of a worker: it ends between two blocks, holds no claim then, and starts at a random time."""

import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from kvbench.cli.sweeps.jobs import claim_of, open_folder, read_entries
from kvbench.cli.workers import work
from kvbench.cli.workers.sigterm import deferring_sigterm
from kvbench.core.claims import is_held
from kvbench.runs.job import Busy
from tests.support.command_line import RUN, Command, start_python

JOBS = [(f"seed={seed}",) for seed in range(3)]


def test_sigterm_ends_a_worker(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = open_folder(tmp_path / "runs", JOBS)

    def do_job(overrides: tuple[str, ...], _: object, around_block: work.AroundBlock, **__: object) -> object:
        if overrides == JOBS[1]:
            signal.raise_signal(signal.SIGTERM)
            with pytest.raises(Busy), around_block(folder, range(2)):
                pytest.fail("the next block was begun")
            raise Busy
        return folder

    monkeypatch.setattr(work, "do_job", do_job)
    before = signal.getsignal(signal.SIGTERM)
    status, out, _ = command("task=work", f"work.folder={folder}")
    assert (status, "ended by SIGTERM" in out) == (143, True)
    assert [entry.outcome for entry in read_entries(folder)] == ["finished", "started", "missing"]
    assert not is_held(claim_of(folder, 1))
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_block_that_outlasts_the_grace_is_interrupted() -> None:
    with deferring_sigterm(0.2) as asked:
        signal.raise_signal(signal.SIGTERM)
        assert asked.is_set()
        with pytest.raises(KeyboardInterrupt):
            time.sleep(30)
    with deferring_sigterm(0), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)


def test_a_launcher_keeps_its_own_handler() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    try:
        with deferring_sigterm(0) as asked:
            signal.raise_signal(signal.SIGTERM)
        assert (seen, asked.is_set()) == ([signal.SIGTERM], False)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_workers_start_randomly(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[float, float]] = []
    monkeypatch.setattr(random, "uniform", lambda *ends: asked.append(ends) or 0.0)
    monkeypatch.setattr(work, "do_job", lambda *_, **__: tmp_path)
    assert command("task=work", "method=swa", "work.jitter=60", f"runs_dir={tmp_path}")[0] == 0
    assert asked == [(0, 60.0)]


def start_command(folder: Path, *words: str, runs: int) -> subprocess.Popen[str]:
    """Start a command in a folder, and return it when so many runs have a sample."""
    process = start_python(folder, RUN, *words, "prompts.count=40", "batch_size=1", "eval=none")
    while len(list(folder.glob("runs/*/*/samples.jsonl"))) < runs and process.poll() is None:
        time.sleep(0.05)
    return process


@pytest.mark.slow
def test_a_process_that_gets_sigterm_finishes_its_block(tmp_path: Path) -> None:
    worker = start_command(tmp_path, "task=work", "method=full", "work.lapse=600", runs=1)
    worker.send_signal(signal.SIGTERM)
    out, _ = worker.communicate(timeout=600)
    assert (worker.returncode, "ended by SIGTERM" in out) == (143, True)
    [records] = tmp_path.glob("runs/*/full-*/samples.jsonl")
    assert 1 <= len(records.read_text().splitlines()) < 40
    assert [path for path in tmp_path.rglob(".*") if path.is_file()] == []


@pytest.mark.slow
def test_a_command_that_gets_sigterm_ends_what_joblib_started(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    launcher = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    conductor = start_command(tmp_path, "-m", "method=full", "seed=1,2", *launcher, runs=2)
    children = Path(f"/proc/{conductor.pid}/task/{conductor.pid}/children").read_text().split()
    started = [Path("/proc", number) for number in children]
    assert len(started) >= 2
    conductor.send_signal(signal.SIGTERM)
    conductor.communicate(timeout=600)
    assert conductor.returncode == 143
    while any(process.exists() for process in started):
        time.sleep(0.05)
    records = list(tmp_path.glob("runs/*/full-*/samples.jsonl"))
    assert [0 < len(record.read_text().splitlines()) < 40 for record in records] == [True, True]
