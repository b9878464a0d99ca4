"""Runs that are generated block by block, as far as their samples are needed."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, repeat
from pathlib import Path

from kvbench.core.budget import Budget
from kvbench.runs.execute import draw_missing, noting_failures, open_folder
from kvbench.runs.generate.batch import load
from kvbench.runs.generate.taken import take_samples
from kvbench.runs.job import Busy, Job
from kvbench.runs.job_identity import identify
from kvbench.runs.prepare import Calibrations, calibrate_job, prepare_method
from kvbench.runs.record.folder import LEFT, RunFolder

log = logging.getLogger(__name__)

POLL_SECONDS = (1.0, 2.0, 4.0, 8.0)
"""Seconds between polls of blocks that other processes generate; they grow, since each poll prepares a cache."""


@dataclass(frozen=True)
class PartialRun:
    """A run whose calibration exists, whose method is prepared and whose folder is open.

    Attributes:
        job: the run.
        folder: its folder.
        calibrations: its calibrations.
        budget: budget of its method.
    """

    job: Job
    folder: RunFolder
    calibrations: Calibrations
    budget: Budget

    def leave(self) -> None:
        """Note in the status of an unfinished run that its race needs no more samples."""
        self.folder.note(LEFT)


def begin(job: Job) -> PartialRun:
    """Load the model of a run, calibrate and prepare its method, and take the samples that earlier runs have."""
    load(job)
    calibrations = calibrate_job(job)
    budget = prepare_method(job, calibrations.artifact)
    folder = open_folder(job, calibrations)
    if not folder.is_whole(len(job.prompts), read=False):
        take_samples(job, folder, identify(job, calibrations))
    return PartialRun(job, folder, calibrations, budget)


def extend(run: PartialRun, block: range, reference: Path | None = None) -> None:
    """Generate the samples of a run up to the end of a block, as `execute.run` does; existing samples are kept.

    It waits for blocks that other processes generate.

    Args:
        run: the run.
        block: samples that are needed.
        reference: folder of the full cache's run, which has these samples; None for that run itself.
    """
    job = replace(run.job, around_block=partial(_refuse_after, block.stop))
    if job.reads and reference is not None:
        job = replace(job, full_pass=reference)
    for wait in chain(POLL_SECONDS, repeat(POLL_SECONDS[-1])):
        if len(run.folder.samples(block)) == len(block):
            return
        run.folder.note("running")
        with noting_failures(run.folder):
            draw_missing(job, run.folder, run.calibrations, run.budget)
        if len(run.folder.samples(block)) < len(block):
            log.debug("%s: waiting for another process to generate samples", run.folder.path.name)
            time.sleep(wait)


@contextmanager
def _refuse_after(stop: int, _: Path, block: range) -> Iterator[None]:
    """Raise `Busy` for blocks from sample `stop` on."""
    if block.start >= stop:
        raise Busy
    yield
