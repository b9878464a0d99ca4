"""Command line: `python run.py method=heatkv budget=0.04`."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from hydra.core.utils import configure_log
from omegaconf import DictConfig

from kvbench.cli.config.compose import (
    hydra_of_kvbench,
)
from kvbench.cli.config.instantiate import VERSION_BASE, allow_targets
from kvbench.cli.config.messages import check_arguments, describe_error, is_expected, is_one_job
from kvbench.cli.config.search_path import check_search_path
from kvbench.cli.console import CONSOLE
from kvbench.cli.dispatch import prepare, read_job, run_task
from kvbench.cli.submit.background import leave
from kvbench.cli.submit.slurm import submit
from kvbench.cli.submit.summary import Summary, end_or_describe, leave_workers, show_sweep
from kvbench.cli.sweeps.folder import (
    compose_sweep,
    find_reading_words,
    find_words,
    list_worker_words,
    names_sweep,
)
from kvbench.cli.sweeps.jobs import Recorder
from kvbench.cli.sweeps.launchers import check_launcher
from kvbench.cli.sweeps.progress import watch
from kvbench.cli.sweeps.slurm_checks import LAUNCHER
from kvbench.cli.sweeps.sweeper import name_base
from kvbench.cli.tasks.publish import publish
from kvbench.cli.workers.control import control
from kvbench.cli.workers.sigterm import TERMINATED, Terminated, interrupting_on_sigterm
from kvbench.core.config import ConfigError

if TYPE_CHECKING:  # of an extra
    from submitit import Job

VERBOSE = dict.fromkeys(("-v", "--verbose"), "verbose=true")
"""Words of the command line that stand for an override."""
INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""


def main() -> None:
    """Do what the command line says: one job, a sweep (`-m`), `publish`, or a command of Hydra's own (`--help`)."""
    prepare()
    try:
        with allow_targets():
            run_arguments([name_base(VERBOSE.get(word, word)) for word in sys.argv[1:]])
    except KeyboardInterrupt as interrupt:
        print(
            "interrupted: what was done is kept, and the same command goes on with the rest", file=sys.stderr
        )
        sys.exit(TERMINATED if isinstance(interrupt, Terminated) else INTERRUPTED)


def run_arguments(arguments: list[str]) -> None:
    """Do what words of the command line say."""
    if arguments[:1] == ["publish"]:
        with _telling_errors():
            publish(arguments[1:])
    elif (words := find_words(arguments)) is not None:
        run_on_sweep(words)
    elif not is_one_job(arguments):
        with _telling_errors():
            reading = find_reading_words(arguments)
        run_by_hydra(arguments) if reading is None else run_alone(reading)
    elif names_sweep(arguments):
        run_by_hydra(["-m", *arguments])
    else:
        run_alone(arguments)


def run_by_hydra(arguments: list[str]) -> None:
    """Run a sweep, or do what a command of Hydra's own says."""
    if (problem := check_arguments(arguments)) is not None:
        sys.exit(f"error: {problem}")
    sys.argv[1:] = arguments
    try:
        with interrupting_on_sigterm():
            _run_by_hydra()
    except KeyboardInterrupt:
        Summary.running = None  # who stops a sweep knows that the rest of it was not done
        raise
    finally:
        if Summary.running is not None:  # the launcher broke before it reported all jobs
            Summary.running.show()


def run_on_sweep(words: list[str]) -> None:
    """Do what a task says with a sweep as a whole: work at it, show how far it is, report what it came to."""
    with _telling_errors(), hydra_of_kvbench():
        check_search_path()
        cfg, hydra_cfg = compose_sweep(words)
        configure_log(hydra_cfg.job_logging, hydra_cfg.verbose)  # type: ignore[arg-type]
        choices, folder = hydra_cfg.runtime.choices, Path(cfg.work.folder)
        alone = choices["hydra/launcher"] == "basic"
        if cfg.task == "work" and cfg.work.do is not None:
            line = control(folder, cfg.work.do, cfg.work.run)
            CONSOLE.print(line, highlight=False, markup=False, soft_wrap=True)
            return
        if cfg.task != "work":
            run_task(cfg)
            return
        workers = list_worker_words(cfg, words)
        jobs = prepare_workers(cfg, choices["hydra/launcher"], workers)
        if not cfg.work.wait:
            return
        if alone or jobs:
            with watch(folder):
                if alone:
                    run_task(cfg)
                for job in jobs:
                    job.wait()
    if not (alone or jobs):
        with watch(folder):
            run_by_hydra(["-m", *workers, f"work.number=range({cfg.work.workers})"])
    if not show_sweep(cfg, folder, choices.get("sweeps") or folder.name):
        sys.exit(1)


def prepare_workers(cfg: DictConfig, launcher: str, workers: list[str]) -> "Sequence[Job[None]]":
    """Make sure that a launcher can start workers; start those that nobody waits for, and queue those of Slurm.

    Args:
        cfg: composed for the sweep.
        launcher: choice of `hydra/launcher`.
        workers: words of the command line of a worker.

    Returns:
        The jobs in Slurm's queue that the command waits for.

    Raises:
        ConfigError: the launcher cannot.
    """
    if launcher == "basic":
        if cfg.work.workers > 1:
            raise ConfigError(
                f"work.workers={cfg.work.workers}: hydra/launcher=basic starts one after the other; choose another "
                "launcher (hydra/launcher=joblib), or leave out work.workers and start this command once per worker"
            )
        if not cfg.work.wait:
            leave(Path(cfg.work.folder))
        return []
    launched = hydra.compose("config", overrides=workers, return_hydra_config=True)
    check_launcher(launched)
    if not cfg.work.wait:
        leave_workers(launched, Path(cfg.work.folder), workers, cfg.work.workers)
        return []
    return submit(launched, workers, cfg.work.workers) if launcher == LAUNCHER else []


def run_alone(overrides: list[str]) -> None:
    """Run one job.

    `hydra.main` composes its configuration three times on the way, a second of a processor; here it is composed once.
    """
    with _telling_errors(), hydra_of_kvbench():
        cfg = read_job(overrides)
        if not cfg.work.wait:
            raise ConfigError("work.wait=false: is for sweeps (-m) and for task=work; leave it out")
        run_task(cfg)


@contextmanager
def _telling_errors() -> Iterator[None]:
    """End the program with one line where a user can mend what went wrong."""
    try:
        yield
    except Exception as error:
        if not is_expected(error):
            raise
        sys.exit(f"error: {describe_error(error, sys.argv[1:])}")


def run_job(cfg: DictConfig) -> object:
    """Run one job of a sweep; return what its task leaves, or why it failed.

    Launchers send it to other processes by its name, which is why it is not the decorated one.
    """
    recorder = Recorder.current
    try:
        return None if recorder is not None and recorder.is_dropped() else run_task(cfg)
    except Exception as error:
        return end_or_describe(error)


_run_by_hydra = hydra.main(config_path="pkg://kvbench.conf", config_name="config", **VERSION_BASE)(run_job)
