"""`task=dashboard`: the page of all runs, written once, or repeatedly while sweeps run."""

import time
from contextlib import suppress
from pathlib import Path

from omegaconf import DictConfig

from kvbench.cli.console import say
from kvbench.cli.sweeps.jobs import PLAN, read_entries
from kvbench.core.settings import Settings
from kvbench.dashboard.page import write_dashboard

SETTLED = ("finished", "failed", "dropped")
"""Final outcomes of jobs."""


def write_page(_: DictConfig, settings: Settings) -> None:
    """Do `task=dashboard`: write the page of every run under `runs_dir`, finished or not.

    With `dashboard.watch` the page is rewritten until all sweeps are done or the user interrupts; only the last version
    does not reload itself.
    """
    every = settings.dashboard.every
    if settings.dashboard.watch:
        write_dashboard(settings.runs_dir, settings.writes, reload=every)
        say(f"watching {settings.runs_dir}; Ctrl-C ends it")
        with suppress(KeyboardInterrupt):
            while not is_done(settings):
                time.sleep(every)
                write_dashboard(settings.runs_dir, settings.writes, reload=every)
    page = write_dashboard(settings.runs_dir, settings.writes)
    say(f"written: {page}")


def is_done(settings: Settings) -> bool:
    """Return whether every job of the sweep in `work.folder`, else of all sweeps in `runs_dir`, is settled.

    False if there is no sweep.
    """
    folder = settings.work.folder
    plans = settings.runs_dir.glob(f"sweeps/*/{PLAN}")
    folders = [plan.parent for plan in plans] if folder is None else [Path(folder)]
    entries = [entry for sweep in folders for entry in read_entries(sweep)]
    return bool(entries) and all(entry.outcome in SETTLED for entry in entries)
