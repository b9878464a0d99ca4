"""Workers of a sweep: any number of processes, each of which takes jobs that no other process works on.

A job is led by one worker, who claims it; where every job that is left is led, others help with its blocks. A worker
waits for nobody while there is something else to do.
"""

import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from socket import gethostname
from typing import NamedTuple

from kvbench.cli.config.compose import compose_job, count_processes, find_finished, read_settings
from kvbench.cli.console import CONSOLE
from kvbench.cli.sweeps.jobs import (
    claim_of,
    drop_of,
    is_newer,
    note_run,
    read_entries,
    read_entry,
    read_requeue,
    recording,
)
from kvbench.cli.sweeps.outcomes import describe_failure
from kvbench.cli.tasks.table import TASKS, make_job
from kvbench.cli.workers.control import read_hold
from kvbench.cli.workers.hosts import (
    MAX_BROKEN,
    blames_host,
    describe_host,
    describe_stop,
    read_stopped_hosts,
    stop_host,
)
from kvbench.cli.workers.log import Block, LogWriter, writing_log
from kvbench.cli.workers.sigterm import TERMINATED, deferring_sigterm
from kvbench.core.claims import claim, read_clock
from kvbench.core.config import UserError
from kvbench.core.devices import take_gpu
from kvbench.core.settings import Settings
from kvbench.runs.calls import remember
from kvbench.runs.execute import run
from kvbench.runs.job import Busy
from kvbench.runs.prepare import books_used, file_used

SHORTEST, LONGEST = 0.1, 5.0
"""Seconds between two looks at jobs that are all in other hands, at first and at last."""
LATER = {"finished": 1, "failed": 2}
"""Outcomes of jobs that are tried last."""

LOOK = 1.0
"""Seconds between two looks at a sweep that is paused."""

AroundBlock = Callable[[Path, range], AbstractContextManager[object]]
"""Makes the context of a block, see `Job.around_block`."""
Numbered = tuple[int, tuple[str, ...]]
"""A job: its number and its overrides."""


class Attempt(NamedTuple):
    """A job that a worker tries to lead or, if `joining`, to help with where another worker leads."""

    job: Numbered
    joining: bool


def work(settings: Settings) -> None:
    """Do what is missing of a sweep, until every job is finished or has failed.

    What is missing comes first; then what was finished before is looked at again, and what failed is tried again.

    Args:
        settings: of the worker; `work.folder` is the sweep's.

    Raises:
        UserError: this host or the whole sweep was stopped, see `kvbench.cli.workers.hosts`.
        SystemExit: the process got SIGTERM.
    """
    time.sleep(random.uniform(0, settings.work.jitter))
    folder = Path(str(settings.work.folder))
    take_gpu(settings.device, settings.work.number + int(os.environ.get("SLURM_LOCALID", "0")))
    lapse, grace = settings.work.lapse, settings.work.grace
    with deferring_sigterm(grace) as asked, writing_log(folder, settings.device, lapse) as log:
        do_jobs(Worker(folder, settings, log, asked, read_clock(folder)))
    if asked.is_set():
        CONSOLE.print("ended by SIGTERM; the same command resumes this worker's runs", highlight=False)
        sys.exit(TERMINATED)


def do_jobs(worker: "Worker") -> None:
    """Have a worker do or help with jobs until all are settled or it is asked to end.

    Raises:
        UserError: this host or the whole sweep was stopped.
    """
    for step in order_work(worker.list_left, random.random()):
        if isinstance(step, Attempt):
            worker.attempt(step.job, joining=step.joining)
            continue
        time.sleep(step)
        worker.wait_while_paused()
        if worker.is_asked():
            return
        if (reason := worker.find_end()) is not None:
            raise UserError(reason)


def order_work(
    list_left: Callable[[Sequence[Numbered]], list[Numbered]], place: float
) -> Iterator[Attempt | float]:
    """Yield what a worker does next, until no job is left: attempts at jobs, and before each look at all, a pause.

    It tries to lead each job and, if that settled none, helps others with theirs. The pause, seconds, is 0 while jobs
    get settled, and doubles from `SHORTEST` to `LONGEST` while they do not.

    Args:
        list_left: see `Worker.list_left`.
        place: where in the list it begins to help, from 0 to below 1. Workers with places of their own spread over the
            jobs, instead of being refused one block after another of the first.
    """
    left, pause = list_left(()), 0.0
    while left:
        yield pause
        before = len(left)
        for joining in (False, True):
            start = int(place * len(left)) if joining else 0
            for job in left[start:] + left[:start]:
                yield Attempt(job, joining)
            left = list_left(left)
            if len(left) < before:
                break
        pause = 0.0 if len(left) < before else min(max(SHORTEST, 2 * pause), LONGEST)


def list_model(overrides: tuple[str, ...]) -> list[str]:
    """Return the words of a job that choose its model."""
    return [word for word in overrides if word.startswith(("model=", "model."))]


@dataclass
class Worker:
    """State of a worker.

    Attributes:
        folder: the sweep's.
        settings: of the worker.
        log: of what it does.
        asked: set when it is to end, and the other workers are not.
        since: when it began, by the file system's clock.
        broken: jobs that broke, none finished between them.
        requeued: when jobs were given back that the worker has looked at.
    """

    folder: Path
    settings: Settings
    log: LogWriter
    asked: threading.Event
    since: float
    broken: list[Numbered] = field(default_factory=list)
    requeued: float = -1.0

    def list_left(self, left: Sequence[Numbered] = ()) -> list[Numbered]:
        """Return the jobs that are not settled, of those that were left or, at first and after a requeue, of all."""
        if (requeued := read_requeue(self.folder)) != self.requeued:
            self.requeued = requeued
            # A model is loaded once when its jobs come one after another.
            entries = sorted(
                read_entries(self.folder), key=lambda e: (LATER.get(e.outcome, 0), list_model(e.overrides))
            )
            left = [(entry.number, entry.overrides) for entry in entries]
        return [job for job in left if not self.is_settled(job)]

    def is_settled(self, job: Numbered) -> bool:
        """Return whether a job was dropped, or has finished or failed since the worker began."""
        if drop_of(self.folder, job[0]).is_file():
            return True
        newer = is_newer(self.folder, job[0], self.since)
        return newer and read_entry(self.folder, *job).outcome in ("finished", "failed")

    def is_asked(self) -> bool:
        """Return whether this worker is to end."""
        return self.asked.is_set() or read_hold(self.folder, self.since) == "stop"

    def wait_while_paused(self) -> None:
        """Return when the sweep is not paused or the worker is to end."""
        if read_hold(self.folder, self.since) == "pause":
            CONSOLE.print("paused; work.do=resume lets this worker go on")
            while read_hold(self.folder, self.since) == "pause" and not self.asked.is_set():
                time.sleep(LOOK)

    def is_wanted(self, number: int) -> bool:
        """Return whether this worker may go on with a job."""
        if self.asked.is_set() or read_hold(self.folder, self.since) is not None:
            return False
        return not drop_of(self.folder, number).is_file() and self.find_end() is None

    def find_end(self) -> str | None:
        """Return why this worker takes no more work, in one line; None while it does."""
        stopped = read_stopped_hosts(self.folder)
        if describe_stop(stopped) is not None:
            return "the sweep was stopped; task=status says why"
        if (host := gethostname()) in stopped:
            return describe_host(host, stopped[host])
        return None

    @contextmanager
    def around_block(self, number: int, run: Path, block: range) -> Iterator[None]:
        """Surround the generation of a block of a job's run or reference: log it, and tell if it was slow.

        Raises:
            Busy: the job is not wanted any more.
        """
        if not self.is_wanted(number):
            raise Busy("paused or dropped")
        started = time.monotonic()
        yield
        done = Block(run.name, len(block), round(time.monotonic() - started, 6))
        if (times := self.log.note_block(done)) is not None:
            line = f"slow: prompts {block.start} to {block.stop - 1} of {run} took {done.seconds:.1f} s, "
            line += f"{times:.0f} times the median of this worker's blocks"
            CONSOLE.print(line, highlight=False, soft_wrap=True)

    def attempt(self, job: Numbered, *, joining: bool) -> None:
        """Do what can be done of a job now; its entry records the outcome.

        Args:
            job: the job.
            joining: help where another worker leads.

        Raises:
            UserError: the job broke, and so did the one before it: this host is stopped.
        """
        number, overrides = job
        place = claim_of(self.folder, number)
        if (
            not joining and place.exists()
        ):  # one call where most are refused; what has lapsed is taken when helping
            return
        if not self.is_wanted(number):
            return
        with claim(place, wait=False, lapse=self.settings.work.lapse) as leads:
            if not (leads or joining) or self.is_settled(job):
                return
            with recording(self.folder, number, overrides) as recorder:
                try:
                    left = do_job(overrides, self.settings, partial(self.around_block, number), leads=leads)
                except Busy:  # the rest is in other hands
                    return
                except Exception as error:
                    line = describe_failure(error)
                    recorder.note_end(line)
                    self.note_failure(job, line, theirs=blames_host(error))
                    return
                self.broken.clear()
                recorder.note_end(left)
                if isinstance(left, Path):
                    CONSOLE.print(f"finished: {left}", highlight=False, soft_wrap=True)

    def note_failure(self, job: Numbered, line: str, *, theirs: bool) -> None:
        """Stop this host if it broke several jobs in a row.

        Args:
            job: the job that failed.
            line: why.
            theirs: whether it may be the host's fault.

        Raises:
            UserError: the host is stopped.
        """
        if theirs:
            self.broken.append(job)
        if len(self.broken) == MAX_BROKEN:
            raise UserError(stop_host(self.folder, gethostname(), line, self.broken))


def do_job(
    overrides: tuple[str, ...], settings: Settings, around_block: AroundBlock, *, leads: bool
) -> object:
    """Do what is missing of a job and return what it leaves.

    Args:
        overrides: of the job.
        settings: of the worker.
        around_block: see `Job`.
        leads: whether the worker holds the claim on the job.

    Raises:
        Busy: others do what is left of it.
        Exception: whatever the job raises.
    """
    cfg, _ = compose_job(list(overrides))
    count_processes(cfg)
    if cfg.task == "run" and (outcome := find_finished(cfg)) is not None and outcome.results is not None:
        note_run(outcome.folder, outcome.results.n)
        return outcome.folder
    own = replace(read_settings(cfg), work=settings.work)
    if own.task != "run":
        if not leads:
            raise Busy("one worker does it")
        return TASKS[own.task](cfg, own)
    made = replace(make_job(cfg, own), patient=False, leads=leads, around_block=around_block)
    outcome = run(made, note_run)
    if outcome.results is None:
        raise Busy("others draw or score the rest")
    remember(made, outcome, file_used(made), books_used(made))
    return outcome.folder
