"""`task=dashboard`: the page of all runs, written once or again and again while sweeps run."""

import time
from contextlib import suppress
from pathlib import Path

from omegaconf import DictConfig

from kvbench.cli.console import CONSOLE
from kvbench.cli.sweeps.jobs import PLAN, read_entries
from kvbench.core.settings import Settings
from kvbench.dashboard.page import write_dashboard

SETTLED = ("finished", "failed", "dropped")
"""Outcomes of jobs that nobody will change."""


def task_dashboard(_: DictConfig, settings: Settings) -> None:
    """Do `task=dashboard`: write the page of every run under `runs_dir`, finished or not.

    With `dashboard.watch` the page is written again until all sweeps are done or the user interrupts; the last one
    does not reload itself.
    """
    every = settings.dashboard.every
    if settings.dashboard.watch:
        write_dashboard(settings.runs_dir, settings.writes, reload=every)
        CONSOLE.print(f"watching {settings.runs_dir}; Ctrl-C ends it", highlight=False, soft_wrap=True)
        with suppress(KeyboardInterrupt):
            while not is_done(settings):
                time.sleep(every)
                write_dashboard(settings.runs_dir, settings.writes, reload=every)
    page = write_dashboard(settings.runs_dir, settings.writes)
    CONSOLE.print(f"written: {page}", highlight=False, soft_wrap=True)


def is_done(settings: Settings) -> bool:
    """Return whether every job of the sweep in `work.folder`, or else of all sweeps in `runs_dir`, is settled.

    Where there is no sweep nothing is done.
    """
    given = settings.work.folder
    plans = settings.runs_dir.glob(f"sweeps/*/{PLAN}")
    folders = [plan.parent for plan in plans] if given is None else [Path(given)]
    entries = [entry for folder in folders for entry in read_entries(folder)]
    return bool(entries) and all(entry.outcome in SETTLED for entry in entries)
