"""Workers of a sweep: any number of processes that share its jobs.

One worker leads a job by claiming it. When every open job has a leader, the other workers help with its blocks.
A worker waits only if it can do nothing else.
"""

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

from kvbench.cli.config.checks import count_processes
from kvbench.cli.config.compose import check_values, compose_job, find_finished, read_values
from kvbench.cli.console import say
from kvbench.cli.sweeps.jobs import claim_of, is_newer, note_run, read_requeue, recording
from kvbench.cli.sweeps.outcomes import describe_failure
from kvbench.cli.tasks.job import make_job
from kvbench.cli.tasks.table import TASKS, load
from kvbench.cli.workers.control import (
    MAX_FAILURES,
    blames_host,
    describe_host,
    read_hold,
    read_stopped_hosts,
    stop_host,
)
from kvbench.cli.workers.log import Block, LogWriter, writing_log
from kvbench.cli.workers.sigterm import TERMINATED, deferring_sigterm
from kvbench.core.claims import claim, read_clock
from kvbench.core.config import UserError, read_count
from kvbench.core.devices import take_gpu
from kvbench.core.settings import Settings
from kvbench.runs.calls import remember
from kvbench.runs.execute import run
from kvbench.runs.job import Busy
from kvbench.runs.record.sweeps import drop_of, read_entries, read_entry

MIN_PAUSE, MAX_PAUSE = 0.1, 5.0
"""Shortest and longest polling interval, in seconds, while other workers hold every job."""
RETRY_ORDER = {"finished": 1, "failed": 2}
"""Rank of the outcomes of jobs that are tried last."""
PAUSED_INTERVAL = 1.0
"""Seconds between two checks of a paused sweep."""

AroundBlock = Callable[[Path, range], AbstractContextManager[object]]
"""Function that returns the context in which a block is generated, see `Job.around_block`."""
Numbered = tuple[int, tuple[str, ...]]
"""Index of a job, from 0, and its overrides."""


class Attempt(NamedTuple):
    """A job that a worker tries to lead or, if `joining`, to help with."""

    job: Numbered
    joining: bool


def work(settings: Settings) -> None:
    """Work on a sweep until every job has finished or failed.

    Missing jobs come first, then finished ones are verified and failed ones tried again.

    Args:
        settings: settings of the worker; `work.folder` is the folder of the sweep.

    Raises:
        UserError: this host is stopped, see `kvbench.cli.workers.control`.
        SystemExit: the process received SIGTERM.
    """
    time.sleep(random.uniform(0, settings.work.jitter))
    folder = Path(str(settings.work.folder))
    take_gpu(settings.device, settings.work.number + read_count("SLURM_LOCALID", 0))
    lapse, grace = settings.work.lapse, settings.work.grace
    with deferring_sigterm(grace) as ending, writing_log(folder, settings.device, lapse) as log:
        do_jobs(Worker(folder, settings, log, ending, read_clock(folder)))
    if ending.is_set():
        say("ended by SIGTERM; the same command resumes this worker's runs")
        sys.exit(TERMINATED)


def do_jobs(worker: "Worker") -> None:
    """Have a worker attempt jobs until all are settled or it has to end; raise UserError if this host is stopped."""
    for step in order_work(worker.list_left, random.random()):
        if isinstance(step, Attempt):
            worker.attempt(step.job, joining=step.joining)
            continue
        time.sleep(step)
        worker.wait_while_paused()
        if worker.ending.is_set() or read_hold(worker.folder, worker.since) == "stop":
            return
        if (reason := worker.find_stop()) is not None:
            raise UserError(reason)


def order_work(
    list_left: Callable[[Sequence[Numbered]], list[Numbered]], place: float
) -> Iterator[Attempt | float]:
    """Yield the steps of a worker until no job is left: attempts at jobs and, before each round, a pause in seconds.

    A round tries to lead each job; if that settles none, it joins jobs of other workers. The pause is 0 while rounds
    settle jobs; otherwise it doubles from `MIN_PAUSE` to `MAX_PAUSE`.

    Args:
        list_left: see `Worker.list_left`.
        place: position in the list where joining begins, in [0, 1). Workers with random positions spread over the jobs
            instead of competing for the blocks of the first one.
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
        pause = 0.0 if len(left) < before else min(max(MIN_PAUSE, 2 * pause), MAX_PAUSE)


@dataclass
class Worker:
    """State of a worker.

    Attributes:
        folder: folder of the sweep.
        settings: settings of the worker.
        log: log of the worker.
        ending: set when this worker alone has to end.
        since: start of the worker, by the file system's clock.
        failures: consecutive failures that the host may have caused.
        requeued: time of the latest requeue that the worker has seen.
    """

    folder: Path
    settings: Settings
    log: LogWriter
    ending: threading.Event
    since: float
    failures: list[Numbered] = field(default_factory=list)
    requeued: float = -1.0

    def list_left(self, left: Sequence[Numbered] = ()) -> list[Numbered]:
        """Return the jobs of `left` that are not settled; of all jobs at first and after a requeue."""
        if (requeued := read_requeue(self.folder)) != self.requeued:
            self.requeued = requeued
            # Jobs of one model are adjacent, so that it is loaded once.
            entries = sorted(
                read_entries(self.folder),
                key=lambda e: (
                    RETRY_ORDER.get(e.outcome, 0),
                    [word for word in e.overrides if word.startswith(("model=", "model."))],
                ),
            )
            left = [(entry.number, entry.overrides) for entry in entries]
        return [job for job in left if not self.is_settled(job)]

    def is_settled(self, job: Numbered) -> bool:
        """Return whether a job is dropped, or finished or failed since the worker began."""
        if drop_of(self.folder, job[0]).is_file():
            return True
        newer = is_newer(self.folder, job[0], self.since)
        return newer and read_entry(self.folder, *job).outcome in ("finished", "failed")

    def wait_while_paused(self) -> None:
        """Block while the sweep is paused and the worker need not end."""
        if read_hold(self.folder, self.since) == "pause":
            say("paused; work.do=resume lets this worker go on")
            while read_hold(self.folder, self.since) == "pause" and not self.ending.is_set():
                time.sleep(PAUSED_INTERVAL)

    def may_continue(self, number: int) -> bool:
        """Return whether this worker, its host and the sweep go on, and the job with index `number` is not dropped."""
        if self.ending.is_set() or read_hold(self.folder, self.since) is not None:
            return False
        return not drop_of(self.folder, number).is_file() and self.find_stop() is None

    def find_stop(self) -> str | None:
        """Return one line about why this host is stopped; None if it is not."""
        host, stopped = gethostname(), read_stopped_hosts(self.folder)
        return describe_host(host, stopped[host]) if host in stopped else None

    @contextmanager
    def around_block(self, number: int, run: Path, block: range) -> Iterator[None]:
        """Return a context that logs the generation of a block of a job's run or reference.

        Raises:
            Busy: the sweep is paused or the job is dropped.
        """
        if not self.may_continue(number):
            raise Busy("paused or dropped")
        started = time.monotonic()
        yield
        self.log.write(vars(Block(run.name, len(block), round(time.monotonic() - started, 6))))

    def attempt(self, job: Numbered, *, joining: bool) -> None:
        """Do the part of a job that is free, and record the outcome in its entry.

        With `joining`, the worker helps if another one leads the job.

        Raises:
            UserError: this and the previous job failed, so this host is stopped.
        """
        number, overrides = job
        place = claim_of(self.folder, number)
        # Most jobs are claimed, and this check is cheap. A lapsed claim is taken over when joining.
        if not joining and place.exists():
            return
        if not self.may_continue(number):
            return
        with claim(place, wait=False, lapse=self.settings.work.lapse) as is_leader:
            if not (is_leader or joining) or self.is_settled(job):
                return
            with recording(self.folder, number, overrides, is_leader=is_leader) as recorder:
                try:
                    result = do_job(
                        overrides, self.settings, partial(self.around_block, number), is_leader=is_leader
                    )
                except Busy:  # other workers do the rest
                    return
                except Exception as error:
                    line = describe_failure(error)
                    recorder.note_end(line)
                    if blames_host(error):
                        self.note_failure(job, line)
                    return
                self.failures.clear()
                recorder.note_end(result)

    def note_failure(self, job: Numbered, line: str) -> None:
        """Count a failure that the host may have caused; at `MAX_FAILURES`, stop the host and raise UserError."""
        self.failures.append(job)
        if len(self.failures) == MAX_FAILURES:
            raise UserError(stop_host(self.folder, gethostname(), line, self.failures))


def do_job(
    overrides: tuple[str, ...], settings: Settings, around_block: AroundBlock, *, is_leader: bool
) -> object:
    """Do the missing part of a job and return the result of its task.

    Raises:
        Busy: other workers do the rest.
        Exception: any error of the job.
    """
    cfg, _ = compose_job(list(overrides))
    count_processes(cfg)
    values = read_values(cfg)
    if cfg.task == "run" and (outcome := find_finished(values)) is not None:
        assert outcome.results is not None
        note_run(outcome.folder, outcome.results.n)
        return outcome.folder
    job_settings = replace(check_values(values), work=settings.work)
    if job_settings.task != "run":
        if not is_leader:
            raise Busy("the worker that leads the job does it")
        return load(TASKS[job_settings.task])(cfg, job_settings)
    job = replace(
        make_job(cfg, job_settings), wait_for_others=False, is_leader=is_leader, around_block=around_block
    )
    outcome = run(job, note_run)
    if outcome.results is None:
        raise Busy("other workers generate or score the rest")
    remember(job, outcome)
    return outcome.folder
