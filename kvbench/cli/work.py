"""A worker: one of any number of processes that do whatever nobody else does of a sweep.

A job is led by one worker, who claims it; where every job that is left is led, others help with its blocks. A worker
waits for nobody while there is something else to do.
"""

import os
import time
from dataclasses import replace
from pathlib import Path

import torch

from kvbench.cli.compose import compose_job, count_processes, find_finished, read_settings
from kvbench.cli.console import CONSOLE
from kvbench.cli.jobs import claim_of, is_newer, note_run, read_entries, read_entry, recording
from kvbench.cli.sweep import describe_failure
from kvbench.cli.tasks import TASKS, make_job
from kvbench.core.locks import claim, read_clock
from kvbench.core.settings import Settings
from kvbench.runs.calls import remember
from kvbench.runs.execute import file_used, run
from kvbench.runs.job import Busy

SHORTEST, LONGEST = 0.1, 5.0
"""Seconds between two looks at jobs that are all in other hands, at first and at last."""

Numbered = tuple[int, tuple[str, ...]]
"""A job: its number and its overrides."""


def work(settings: Settings) -> None:
    """Do what is missing of a sweep, until every job is finished or has failed.

    What was finished before this worker began is looked at again, and what failed before is tried again.

    Args:
        settings: of the worker; `work.folder` is the sweep's.
    """
    folder = Path(str(settings.work.folder))
    take_gpu(settings)
    since = read_clock(folder)
    # A model is loaded once when its jobs come one after another.
    entries = sorted(read_entries(folder), key=lambda entry: list_model(entry.overrides))
    left, pause = [(entry.number, entry.overrides) for entry in entries], SHORTEST
    while left:
        before = len(left)
        for joining in (False, True):
            for job in left:
                attempt(folder, job, settings, since, joining=joining)
            left = [job for job in left if not is_settled(folder, job, since)]
            if len(left) < before:
                break
        pause = SHORTEST if len(left) < before else min(2 * pause, LONGEST)
        if left and len(left) == before:
            time.sleep(pause)


def take_gpu(settings: Settings) -> None:
    """Let a process that has used no GPU yet see one alone: that of `device=cuda:N`, or that of the worker's number."""
    if not settings.device.startswith("cuda") or not (count := torch.cuda.device_count()):
        return
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    _, named, index = settings.device.partition(":")
    os.environ["CUDA_VISIBLE_DEVICES"] = seen[(int(index) if named else settings.work.number) % count]


def list_model(overrides: tuple[str, ...]) -> list[str]:
    """Return the words of a job that choose its model."""
    return [word for word in overrides if word.startswith(("model=", "model."))]


def is_settled(folder: Path, job: Numbered, since: float) -> bool:
    """Return whether a job has finished or failed since some time of the file system's clock."""
    return is_newer(folder, job[0], since) and read_entry(folder, *job).outcome in ("finished", "failed")


def attempt(folder: Path, job: Numbered, settings: Settings, since: float, *, joining: bool) -> None:
    """Do what can be done of a job now; its entry tells what came of it.

    Args:
        folder: the sweep's.
        job: the job.
        settings: of the worker.
        since: when the worker began.
        joining: help where another worker leads.
    """
    number, overrides = job
    with claim(claim_of(folder, number), wait=False, lapse=settings.work.lapse) as leads:
        if not (leads or joining) or is_settled(folder, job, since):
            return
        with recording(folder, number, overrides) as recorder:
            try:
                left = do_job(overrides, settings, leads=leads)
            except Busy:  # the rest is in other hands
                return
            except Exception as error:
                left = describe_failure(error)
            recorder.note_end(left)
            if isinstance(left, Path):
                CONSOLE.print(f"finished: {left}", highlight=False, soft_wrap=True)


def do_job(overrides: tuple[str, ...], settings: Settings, *, leads: bool) -> object:
    """Do what is missing of a job and return what it leaves.

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
    made = replace(make_job(cfg, own), patient=False)
    outcome = run(made, note_run)
    if outcome.results is None:
        raise Busy("others draw or score the rest")
    remember(made, outcome, file_used(made))
    return outcome.folder
