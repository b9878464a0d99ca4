"""Command line: `python run.py method=heatkv budget=0.04`."""

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from hydra.core.plugins import Plugins
from hydra.core.utils import configure_log
from omegaconf import DictConfig

from kvbench.cli.background import leave
from kvbench.cli.compose import (
    check_runs_dir,
    compose_job,
    count_processes,
    find_finished,
    hydra_of_kvbench,
    read_settings,
)
from kvbench.cli.console import CONSOLE, show_device
from kvbench.cli.control import control
from kvbench.cli.instantiate import VERSION_BASE, allow_targets
from kvbench.cli.jobs import Recorder, note_run
from kvbench.cli.launchers import check_launcher
from kvbench.cli.messages import check_arguments, describe_error, is_expected, is_one_job
from kvbench.cli.progress import watch
from kvbench.cli.publish import publish
from kvbench.cli.search_path import PluginSearchPath, check_search_path
from kvbench.cli.sigterm import TERMINATED, Terminated, interrupting_on_sigterm, wait_to_be_killed
from kvbench.cli.slurm import LAUNCHER, submit
from kvbench.cli.status import show_status
from kvbench.cli.sweep import Summary, describe_failure, end_or_describe, leave_workers, show_sweep
from kvbench.cli.sweep_folder import (
    compose_sweep,
    find_reading_words,
    find_words,
    list_worker_words,
    names_sweep,
)
from kvbench.cli.sweeper import extend_sweeper, name_base
from kvbench.core.config import ConfigError

if TYPE_CHECKING:  # of an extra
    from submitit import Job

VERBOSE = dict.fromkeys(("-v", "--verbose"), "verbose=true")
"""Words of the command line that stand for an override."""
COMPUTING = ("run", "evaluate", "bounds", "check", "calibrate", "profile", "train", "work")
"""Tasks that use the device."""
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


def prepare() -> None:
    """Prepare this process and Hydra for the command line."""
    # Read when torch is loaded. Threads that wait in a loop take the processor from other runs on this machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would tell its makers of every sweep
    logging.captureWarnings(capture=True)
    Plugins.instance().register(PluginSearchPath)
    extend_sweeper()


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
        cfg = _read_job(overrides)
        if not cfg.work.wait:
            raise ConfigError("work.wait=false: is for sweeps (-m) and for task=work; leave it out")
        run_task(cfg)


def _read_job(overrides: list[str]) -> DictConfig:
    """Compose one job, and have this process log as it says; Hydra must be initialised."""
    check_search_path()
    cfg, hydra_cfg = compose_job(overrides)
    configure_log(hydra_cfg.job_logging, hydra_cfg.verbose)  # type: ignore[arg-type]
    return cfg


def run_worker(words: list[str]) -> None:
    """Work in a process that Slurm started, and print what goes wrong.

    A worker that ends on SIGTERM stays until Slurm kills it: Slurm does not requeue a preempted job whose processes
    have all ended.

    Args:
        words: of the command line, without lists of values.
    """
    prepare()
    try:
        with allow_targets(), hydra_of_kvbench():
            run_task(_read_job(words))
    except (KeyboardInterrupt, SystemExit) as end:
        if isinstance(end, SystemExit) and end.code != TERMINATED:
            raise
        wait_to_be_killed()
    except Exception as error:
        describe_failure(error)


@contextmanager
def _telling_errors() -> Iterator[None]:
    """End the program with one line where a user can mend what went wrong."""
    try:
        yield
    except Exception as error:
        if not is_expected(error):
            raise
        sys.exit(f"error: {describe_error(error, sys.argv[1:])}")


def run_task(cfg: DictConfig) -> object:
    """Run the task that a composed configuration asks for, and return what the task leaves.

    Raises:
        ConfigError: a setting is wrong, or `runs_dir` cannot be written.
        Exception: whatever the task raises.
    """
    if cfg.get("task") == "status":
        show_status(CONSOLE, Path(cfg.work.folder), verbose=cfg.verbose)
        return None
    count_processes(cfg)
    if cfg.get("task") in COMPUTING and Recorder.current is None and os.environ.get("RANK", "0") == "0":
        show_device(cfg.device)
    # Finished calls come first and what imports torch comes last: seconds that neither they nor a typo need wait for.
    if cfg.get("task") == "run" and (folder := show_finished(cfg)) is not None:
        return folder
    settings = read_settings(cfg)
    check_runs_dir(settings)
    from kvbench.cli.tasks import TASKS
    from kvbench.cli.work import work
    from kvbench.core.devices import keep_freed_memory

    keep_freed_memory()
    if settings.task == "work":
        work(settings)
        return None
    return TASKS[settings.task](cfg, settings)


def show_finished(cfg: DictConfig) -> Path | None:
    """Print the run that the same call has finished before, and return its folder; None if it must be made.

    Of several processes the first prints it.
    """
    if (outcome := find_finished(cfg)) is None or outcome.results is None:
        return None
    from kvbench.report.one_run import show_outcome  # imports numpy, which `--help` does without

    note_run(outcome.folder, outcome.results.n)
    if os.environ.get("RANK", "0") == "0":
        show_outcome(CONSOLE, outcome, verbose=cfg.verbose)
    return outcome.folder


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
