"""`task=dashboard`: the page of all runs, written once, or repeatedly while sweeps run."""

import time
from contextlib import suppress
from pathlib import Path

from omegaconf import DictConfig

from kvbench.cli.console import say
from kvbench.cli.sweeps.jobs import find_named
from kvbench.cli.sweeps.outcomes import list_runs
from kvbench.core.settings import Settings
from kvbench.dashboard.datasets import LoadedDatasets, find_datasets
from kvbench.dashboard.folders import find_folders
from kvbench.dashboard.page import write_bundle, write_dashboard
from kvbench.engine.memory import MIB
from kvbench.runs.record.sweeps import PLAN, read_entries

FINAL_OUTCOMES = ("finished", "failed", "dropped")
"""Final outcomes of jobs."""


def write_page(_: DictConfig, settings: Settings) -> None:
    """Run `task=dashboard`: write the page of every run under `runs_dir`, finished or not, or of one sweep.

    If `runs_dirs` names published datasets, the page has their runs too. With `dashboard.bundle` it is one file with
    the images. With `dashboard.watch` the page is rewritten until all sweeps are done or the user interrupts; only
    the last version does not reload itself.

    Raises:
        ConfigError: no sweep has that name, `runs_dirs` names no folder, or there is nothing to show.
    """
    printed: set[str] = set()
    if settings.dashboard.bundle:
        added = read_datasets(settings, printed)
        page = write_bundle(settings.runs_dir, settings.writes, choose_runs(settings), added)
        say(f"written: {page} ({page.stat().st_size / MIB:.1f} MiB)")
        return

    def write(reload: float | None = None) -> Path:
        added = read_datasets(settings, printed)
        return write_dashboard(settings.runs_dir, settings.writes, reload, choose_runs(settings), added)

    every = settings.dashboard.every
    if settings.dashboard.watch:
        write(every)
        say(f"watching {settings.runs_dir}; Ctrl-C ends it")
        with suppress(KeyboardInterrupt):
            while not is_done(settings):
                time.sleep(every)
                write(every)
    say(f"written: {write()}")


def read_datasets(settings: Settings, printed: set[str]) -> LoadedDatasets:
    """Return the datasets in `runs_dirs`; print which folders are left out.

    Args:
        settings: settings of the task.
        printed: lines of earlier calls, which are not printed again; new lines are added.

    Raises:
        ConfigError: an entry of `runs_dirs` names no folder.
    """
    added = find_datasets(settings.runs_dirs)
    for one in added.left_out:
        line = f"left out: {one.folder}: {one.reason}"
        if line not in printed:
            say(line)
        printed.add(line)
    return added


def choose_runs(settings: Settings) -> list[Path] | None:
    """Return the folders of the runs of the sweep in `work.folder` or of `sweep.name`, and of their references.

    None if no sweep is named.

    Raises:
        ConfigError: no sweep has that name.
    """
    name, sweep = settings.sweep.name, settings.work.folder
    if sweep is None and name is None:
        return None
    entries = read_entries(Path(sweep or find_named(settings.runs_dir, str(name))))
    folders = [settings.runs_dir.joinpath(*folder.parts[-2:]) for folder in list_runs(entries)]
    finished = find_folders(settings.runs_dir, folders).finished
    references = [folder.parent / run.reference for folder, run in finished.items() if run.reference]
    return [folder for folder in dict.fromkeys([*folders, *references]) if folder.is_dir()]


def is_done(settings: Settings) -> bool:
    """Return whether every job of the sweep in `work.folder`, else of all sweeps in `runs_dir`, is settled.

    False if there is no sweep.
    """
    folder = settings.work.folder
    plans = settings.runs_dir.glob(f"sweeps/*/{PLAN}")
    folders = [plan.parent for plan in plans] if folder is None else [Path(folder)]
    entries = [entry for sweep in folders for entry in read_entries(sweep)]
    return bool(entries) and all(entry.outcome in FINAL_OUTCOMES for entry in entries)
