"""Costs of a worker's steps: calls on files and seconds, measured with the real worker on runs of a tiny model."""

import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.support.file_calls import begin_section, count_calls
from kvbench.cli.config.compose import compose_job, hydra_of_kvbench, read_settings
from kvbench.cli.sweeps.jobs import claim_of, find_folder, read_entry
from kvbench.cli.workers.log import writing_log
from kvbench.cli.workers.work import Numbered, Worker
from kvbench.core.claims import claim, read_clock
from kvbench.runs.job import Busy
from kvbench.runs.record.folder import RunFolder, RunName

SIZES = (2, 6)
"""Blocks of the measured runs: a cost is a line through both."""
JOBS = 4


@dataclass(frozen=True)
class Costs:
    """Calls on files that a worker's steps make, for one number of samples per block, and seconds.

    Attributes:
        look: for each job left, when a worker lists what is left.
        refused: an attempt to lead a job that another worker leads.
        attempt: an attempt that gets through, apart from blocks.
        attempt_seconds: processor time of it; mostly the composition of the configuration.
        first: in addition, where the run's folder is made and the run is scored.
        known: a block whose samples are there, each time that a run's samples are listed.
        read: a block that another process drew, the first time that it is listed.
        block: a block that this worker draws, saves and scores.
        busy: a block that another worker draws.
    """

    look: float
    refused: float
    attempt: float
    attempt_seconds: float
    first: float
    known: float
    read: float
    block: float
    busy: float


def measure_costs(batch: int) -> Costs:
    """Measure all costs, in two processes: traced for the calls, untraced for seconds.

    Args:
        batch: samples of a block.

    Raises:
        subprocess.CalledProcessError: strace is missing or a run failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(_make_command(folder, batch), check=True, capture_output=True, text=True)
    return solve_costs(trace_steps(batch), json.loads(done.stdout.splitlines()[-1]))


def trace_steps(batch: int) -> dict[str, float]:
    """Return the calls on files of each step, by its name and the number of blocks of its run; see `measure_costs`."""
    with tempfile.TemporaryDirectory() as runs, tempfile.TemporaryDirectory() as beside:
        found = count_calls(_make_command(runs, batch), Path(runs).resolve(), Path(beside, "trace"))
    return {name: float(counts.total()) for name, counts in found.items()}


def _make_command(runs_dir: str, batch: int) -> list[str]:
    return [sys.executable, "-c", f"from {__name__} import act_all; act_all({runs_dir!r}, {batch})"]


def solve_costs(calls: Mapping[str, float], seconds: Mapping[str, float]) -> Costs:
    """Return the costs that calls and seconds of steps, by name and number of blocks, come to."""
    known, _ = _fit(calls, "listed")
    cold, _ = _fit(calls, "listed first")
    drawn, led = _fit(calls, "led")
    refused, joined = _fit(calls, "joined")
    return Costs(
        look=calls[f"look {SIZES[0]}"] / JOBS,
        refused=calls[f"refused {SIZES[0]}"],
        attempt=joined,
        attempt_seconds=round(_fit(seconds, "joined")[1], 3),
        first=led - joined,
        known=known,
        read=cold - known,
        block=drawn - known,
        busy=refused - known,
    )


def _fit(found: Mapping[str, float], section: str) -> tuple[float, float]:
    """Return what a section costs for each block and apart from blocks."""
    small, large = (found[f"{section} {size}"] for size in SIZES)
    slope = (large - small) / (SIZES[1] - SIZES[0])
    return round(slope, 2), round(small - slope * SIZES[0], 2)


def act_all(runs_dir: str, batch: int) -> None:
    """Do each step once in a section of its own, and print the seconds of the sections."""
    seconds: dict[str, float] = {}
    with hydra_of_kvbench():
        for size in SIZES:
            _act(Path(runs_dir), size, batch, seconds)
    print(json.dumps(seconds))


def _act(runs_dir: Path, size: int, batch: int, seconds: dict[str, float]) -> None:
    @contextmanager
    def section(name: str) -> Iterator[None]:
        begin_section(f"{name} {size}")
        started = time.process_time()
        yield
        seconds[f"{name} {size}"] = time.process_time() - started
        begin_section("between")

    words = ["eval=[psnr]", f"prompts.count={batch * size}", f"batch_size={batch}", f"runs_dir={runs_dir}"]
    jobs = [("method=random", f"budget={budget}", *words) for budget in (0.1, 0.2, 0.3, 0.4)]
    folder = find_folder(runs_dir, jobs)
    settings = read_settings(compose_job(["task=work", f"work.folder={folder}", *words])[0])
    with writing_log(folder, "cpu", settings.work.lapse) as log:
        worker = Worker(folder, settings, log, threading.Event(), read_clock(folder))
        left = worker.list_left()
        with section("look"):
            worker.list_left(left)
        first, second, third, fourth = left
        worker.attempt(first, joining=False)  # generates the reference too
        with section("led"):
            worker.attempt(second, joining=False)
        _list_samples(_find_run(folder, second), runs_dir / f"copy-{size}", section)
        with claim(claim_of(folder, third[0])), section("refused"):
            worker.attempt(third, joining=False)
        _Idle(folder, settings, log, threading.Event(), worker.since).attempt(fourth, joining=False)
        run = _find_run(folder, fourth)
        with ExitStack() as held:
            for start in range(0, batch * size, batch):
                held.enter_context(claim(run / f".block-{start}-{start + batch}"))
            with section("joined"):
                worker.attempt(fourth, joining=True)


class _Idle(Worker):
    """Worker that opens runs and leaves their blocks to others."""

    @contextmanager
    def around_block(self, number: int, run: Path, block: range) -> Iterator[None]:
        raise Busy
        yield


def _find_run(folder: Path, job: Numbered) -> Path:
    """Return the folder of a job's run, which comes before its reference's."""
    return Path(next(iter(read_entry(folder, *job).samples)))


def _list_samples(run: Path, copy: Path, section: Callable[[str], AbstractContextManager[None]]) -> None:
    """List a run's samples twice: first those of a copy, whose files this process has not read."""
    shutil.copytree(run, copy / run.parent.name / run.name)
    folder = RunFolder(copy, run.parent.name, RunName.of(run.name), make=False)
    for name in ("listed first", "listed"):
        with section(name):
            folder.samples()
