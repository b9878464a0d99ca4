"""Runs that are generated block by block, as far as their samples are needed."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from kvbench.runs.execute import OpenRun, draw_missing, noting_failures, open_run
from kvbench.runs.generate.batch import load
from kvbench.runs.generate.taken import take_samples
from kvbench.runs.job import Busy, Job
from kvbench.runs.job_identity import identify
from kvbench.runs.record.folder import LEFT

POLL_SECONDS = 4.0
"""Seconds between polls of blocks that other processes generate; each poll prepares a cache."""


def begin(job: Job) -> OpenRun:
    """Load the model of a run, calibrate and prepare its method, and take the samples that earlier runs have."""
    load(job)
    run = open_run(job)
    if not run.folder.is_whole(len(job.prompts), read=False):
        take_samples(job, run.folder, identify(job, run.calibrations))
    return run


def extend(run: OpenRun, block: range, reference: Path | None = None) -> None:
    """Generate the samples of a run up to the end of a block, as `execute.run` does; existing samples are kept.

    It waits for blocks that other processes generate.

    Args:
        run: the run.
        block: samples that are needed.
        reference: folder of the full cache's run, which has these samples; None for that run itself.
    """
    run = run._replace(job=replace(run.job, around_block=partial(_refuse_after, block.stop)))
    while len(run.folder.samples(block)) < len(block):
        run.folder.note("running")
        with noting_failures(run.folder):
            draw_missing(run, reference)
        if len(run.folder.samples(block)) < len(block):
            time.sleep(POLL_SECONDS)


def leave(run: OpenRun) -> None:
    """Note in the status of an unfinished run that its race needs no more samples."""
    run.folder.note(LEFT)


@contextmanager
def _refuse_after(stop: int, _: Path, block: range) -> Iterator[None]:
    """Raise `Busy` for blocks from sample `stop` on."""
    if block.start >= stop:
        raise Busy
    yield
