"""Progress lines and final tables of a sweep, and the start of its workers in the background."""

import logging
import math
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from socket import gethostname

from omegaconf import DictConfig, open_dict

from kvbench.cli.config.instantiate import instantiate
from kvbench.cli.console import CONSOLE, say
from kvbench.cli.submit.ray import runs_by_itself, submit_actors
from kvbench.cli.submit.slurm import submit
from kvbench.cli.sweeps.folder import list_worker_words
from kvbench.cli.sweeps.launchers import SLURM, count_tasks
from kvbench.cli.sweeps.outcomes import list_equal, list_failures, list_profiles, list_runs
from kvbench.cli.sweeps.progress import watch
from kvbench.cli.sweeps.sweeper import list_jobs
from kvbench.cli.tasks.table import COMMANDS, load
from kvbench.runs.record.sweeps import JobStatus, name_jobs, read_entries

log = logging.getLogger(__name__)

LOG = "background.log"
"""Output of the background process, in the sweep's folder."""


def show_sweep(config: DictConfig, folder: Path, name: str, entries: Sequence[JobStatus]) -> bool:
    """Print the tables of a sweep's runs, send and pack the runs if configured; return whether every job is finished.

    `name` is the choice of `sweeps`, or the folder's name; `entries` are the sweep's jobs.
    """
    # These import numpy, and Hydra makes the callback for `--help` too.
    from kvbench.report.collect import read_with_bounds, read_with_references
    from kvbench.report.differences import show_calibrations
    from kvbench.report.runs_table import show_runs
    from kvbench.report.seeds import combine_seeds

    folders, failures = list_runs(entries), list_failures(folder, entries)
    runs_dir = Path(config.runs_dir).expanduser()
    timed, published = list_profiles(entries), config.published
    if timed and not folders:
        show_runs(CONSOLE, [], failures)
        from kvbench.report.papers.speed import show_speed

        show_speed(CONSOLE, published, timed, runs_dir)
        return not failures
    runs = read_with_bounds(folders)
    joined = combine_seeds(runs, runs_dir)
    rows = joined if config.report.seeds == "mean" else runs
    show_runs(CONSOLE, rows, failures, verbose=config.verbose, as_given=True)
    for line in list_equal(entries):
        say(line)
    show_calibrations(CONSOLE, joined, runs_dir, folder, config.against)
    if published is not None:
        from kvbench.cli.tasks.report import show_published  # imports torch

        compared = combine_seeds(read_with_references(folders), runs_dir)
        show_published(config, published, compared, entries, runs_dir)
    if config.logger:
        _send(config, folder, name, folders)
    if config.sweep.pack is not None and folders and not failures:
        load(COMMANDS["publish"])([*map(str, folders), f"out={config.sweep.pack}"])
        say(f"generate a part of it again, here or elsewhere: kvbench verify {config.sweep.pack}")
    return not failures


def _send(config: DictConfig, folder: Path, name: str, folders: Sequence[Path]) -> None:
    """Send a sweep and the dashboard of all runs to the logger."""
    from kvbench.dashboard.page import write_dashboard
    from kvbench.report.collect import read_runs
    from kvbench.runs.score.tracker import reporting_failure

    if not (runs := read_runs(folders)):
        return
    page = None
    if find_spec("jinja2") is not None:  # it belongs to the extra `dashboard`
        page = write_dashboard(Path(config.runs_dir).expanduser())
    with reporting_failure(f"sweep {name}"):
        instantiate(config.logger).send_sweep(folder, name, runs, page)


def watch_jobs(config: DictConfig, folder: Path) -> AbstractContextManager[None]:
    """Print a line, or with `verbose` a table, when a job of a sweep ends in any process; jobs print nothing."""
    # Imports numpy before a thread starts, because threads that import at the same time can fail.
    from kvbench.report.collect import read_runs
    from kvbench.report.one_run import describe_run, show_run
    from kvbench.report.tables import print_line

    before = read_entries(folder)
    shown = {entry.number for entry in before if entry.outcome == "finished"}
    if shown:
        say(f"{len(shown)} of {len(before)} jobs found finished")

    names = name_jobs(before)
    width = max(map(len, names), default=0)

    def show_ended(entries: Sequence[JobStatus]) -> None:
        for entry, name in zip(entries, names, strict=True):
            if entry.outcome not in ("finished", "failed"):
                shown.discard(entry.number)
            elif entry.number not in shown:
                shown.add(entry.number)
                label = name.ljust(width)
                if entry.outcome == "failed":
                    print_line(CONSOLE, f"{label}  failed: {entry.error}", "red")
                for run in read_runs([Path(entry.folder)]) if entry.folder else ():
                    if config.verbose:
                        show_run(CONSOLE, run)
                    else:
                        say(f"{label}  {describe_run(run, CONSOLE.width - width - 2)}")

    return watch(folder, show_ended)


def start_sweep_workers(config: DictConfig, folder: Path) -> None:
    """Start workers for a sweep's jobs without waiting for them.

    One worker per job; on Slurm at most as many as the array runs at a time.
    """
    with open_dict(config):
        config.work.folder = str(folder)
    launcher, workers = config.hydra.launcher, len(list_jobs(config))
    if config.hydra.runtime.choices["hydra/launcher"] == SLURM:
        tasks = count_tasks(launcher)
        workers = min(math.ceil(workers / tasks), launcher.array_parallelism) * tasks
    start_workers(config, folder, list_worker_words(config, config.hydra.overrides.hydra), workers)


def start_workers(config: DictConfig, folder: Path, words: Sequence[str], workers: int) -> None:
    """Start a number of workers on Slurm or a Ray cluster, else repeat this command in the background."""
    if config.hydra.runtime.choices["hydra/launcher"] == SLURM:
        submit(config, words, workers)
    elif runs_by_itself(config):
        submit_actors(config, words, workers)
    else:
        start_in_background(folder)


def start_in_background(folder: Path) -> None:
    """Start this command again in its own session, which survives the terminal; print how to watch and stop it."""
    words = [word for word in sys.orig_argv[1:] if not word.startswith("work.wait=")]
    with (folder / LOG).open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    say(
        f"in the background on {gethostname()}, output in {folder / LOG}; watch: task=status "
        f"work.folder={folder}; stop: kill -INT -- -{process.pid}; resume: run the same command again"
    )
