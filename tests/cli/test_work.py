"""Workers of a sweep: killed, added, told to end by SIGTERM, and what they say of themselves."""

import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvbench.cli.sweeps.jobs import claim_of, find_folder, open_folder, write_entry
from kvbench.cli.sweeps.progress import find_states, measure
from kvbench.cli.workers import work
from kvbench.cli.workers.log import read_logs
from kvbench.cli.workers.sigterm import deferring_sigterm
from kvbench.cli.workers.work import Numbered, order_work
from kvbench.core.claims import claim, is_held
from kvbench.runs.job import Busy
from kvbench.runs.record.sweeps import JobStatus, read_entries
from tests.cli.test_start import slow_imports
from tests.support.command_line import RUN, Command, start_python
from tests.support.kills import read_files
from tests.support.places import ROOT

SWEEP = ("method=full,swa", "budget=0.2,0.3", "prompts.count=4", "batch_size=1", "eval=[psnr]")
TIMES = ("seconds", "started", "finished", "latency", "code", "rebuild", "load")
"""Keys of JSON files whose values are times, the load, or the state of a checkout that somebody may work in."""


def start(folder: Path, *arguments: str, machine: str, stop: int = 0) -> subprocess.Popen[str]:
    program = (str(ROOT / "tests/support/worker.py"), machine, str(stop))
    return start_python(folder, *program, "task=work", *arguments, "work.lapse=3")


@pytest.mark.slow
def test_killed_added_and_restarted_workers_leave_the_bytes_of_one(command: Command, tmp_path: Path) -> None:
    together = tmp_path / "together"
    together.mkdir()
    dying = start(together, *SWEEP, machine="first", stop=3)
    assert dying.stdout is not None
    assert any(line.endswith("hangs\n") for line in dying.stdout)  # after a progress bar
    second = start(together, *SWEEP, machine="second")
    while any(together.rglob(".block-1-2")):  # is saved while the next one hangs
        time.sleep(0.01)
    dying.send_signal(signal.SIGKILL)
    dying.wait()
    left = [path.name for path in together.rglob(".*") if path.is_file()]
    assert any(name.startswith(".block-2-3") for name in left)
    assert ".job-00000" in left
    third = start(together, *SWEEP, machine="third")
    for worker in (second, third):
        out, _ = worker.communicate(timeout=600)
        assert worker.returncode == 0, out
        late = re.search(r"(\d+) answers of the file system were late", out)
        assert late is not None
        assert int(late[1]) > 0
    assert [path for path in together.rglob(".*") if path.is_file() and ".calls" not in path.parts] == []
    logs = read_logs(next((together / "runs/sweeps").iterdir()))
    assert sum(log.samples for log in logs) == 12  # none was drawn twice
    assert command("task=work", *SWEEP)[0] == 0
    assert read_files(together / "runs", TIMES) == read_files(tmp_path / "runs", TIMES)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs/infinity_tiny").rglob("*")}
    assert command("task=work", *SWEEP)[0] == 0  # once more: everything is found
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs/infinity_tiny").rglob("*")}
    assert after == before
    slow, out = slow_imports(together, "task=status", *SWEEP)
    assert slow == []
    assert "jobs: 4 done, 0 running, 0 failed, 0 missing; samples: 12 of 12; time left: -" in out


def test_progress_counts_jobs_and_samples_and_foresees_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [(f"method={name}",) for name in "abcde"]
    folder = open_folder(tmp_path, jobs)
    now = folder.stat().st_mtime
    monkeypatch.setattr("kvbench.cli.sweeps.progress.read_clock", lambda _: now)
    finished, half = tmp_path / "model/a", tmp_path / "model/b"
    for run, drawn in ((finished, 10), (half, 4)):
        (run / "images").mkdir(parents=True)
        (run / "samples.jsonl").write_text("{}\n" * drawn)
        for index in range(drawn):
            image = run / f"images/{index % 2}/{index}.png"
            image.parent.mkdir(exist_ok=True)
            image.touch()
            os.utime(image, (now - 10 * (drawn - index), now - 10 * (drawn - index)))
    (finished / "results.json").touch()
    write_entry(folder, JobStatus(0, jobs[0], "finished", str(finished), samples={str(finished): 10}))
    write_entry(folder, JobStatus(1, jobs[1], "started", samples={str(half): 10, str(finished): 10}))
    write_entry(folder, JobStatus(2, jobs[2], "failed", error="e", samples={str(tmp_path): 10}))
    write_entry(folder, JobStatus(3, jobs[3], "started"))
    entries = read_entries(folder)
    with claim(claim_of(folder, 1)):
        far = measure(folder, entries, find_states(folder, entries))
    assert (far.finished, far.running, far.failed, far.missing) == (1, 1, 1, 2)
    assert (far.drawn, far.samples) == (14, 10 + 10 + 2 * 10)
    assert far.seconds == pytest.approx(100 / 13 * 26)  # 13 after the first one, in 100 s
    assert measure(folder, entries, find_states(folder, entries)).seconds is None


def test_the_folder_of_a_sweep_is_that_of_its_jobs(tmp_path: Path) -> None:
    one = find_folder(tmp_path, [("a=1", "b=2"), ("a=1", "b=3")])
    assert find_folder(tmp_path, [("b=2", "a=1"), ("b=3", "a=1")]) == one
    write_entry(one, JobStatus(1, ("a=1", "b=3"), "finished", "here"))
    more = find_folder(tmp_path, [("a=1", "b=4"), ("b=3", "a=1")])
    assert more != one
    assert [entry.outcome for entry in read_entries(more)] == ["missing", "finished"]
    assert read_entries(more)[1].folder == "here"


def take_steps(settled: Sequence[set[int]], place: float) -> str:
    """What a worker does of four jobs: `1` leads job 1, `1+` helps with it, `0.1s` pauses; a set is settled a look."""
    looks, gone = iter(settled), set[int]()

    def list_left(left: Sequence[Numbered]) -> list[Numbered]:
        if not left:
            return [(number, ()) for number in range(4)]
        gone.update(next(looks))
        return [job for job in left if job[0] not in gone]

    return " ".join(
        f"{step:g}s" if isinstance(step, float) else f"{step.job[0]}{'+' * step.joining}"
        for step in order_work(list_left, place)
    )


def test_a_worker_helps_where_it_cannot_lead_and_pauses_longer_while_nothing_is_settled() -> None:
    assert take_steps([{0, 1}, set(), {2}, {3}], 0) == "0s 0 1 2 3 0s 2 3 2+ 3+ 0s 3"
    steps = take_steps([*[set()] * 16, {0, 1, 2, 3}], 0).split()
    assert " ".join(step for step in steps if step.endswith("s")) == "0s 0.1s 0.2s 0.4s 0.8s 1.6s 3.2s 5s 5s"


def test_workers_begin_to_help_at_places_of_their_own() -> None:
    found = [take_steps([set(), {0, 1, 2, 3}], place) for place in (0, 0.3, 0.99)]
    assert found == [f"0s 0 1 2 3 {helped}" for helped in ("0+ 1+ 2+ 3+", "1+ 2+ 3+ 0+", "3+ 0+ 1+ 2+")]


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
