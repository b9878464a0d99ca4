"""Dispatch of one composed command to its task."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import configure_log
from hydra.types import RunMode
from omegaconf import DictConfig

from kvbench.cli.config.checks import check_runs_dir, count_processes
from kvbench.cli.config.compose import check_values, compose_job, find_finished, hydra_of_kvbench, read_values
from kvbench.cli.config.instantiate import allow_targets
from kvbench.cli.config.search_path import PluginSearchPath, check_search_path
from kvbench.cli.console import CONSOLE, ONCE, show_device
from kvbench.cli.sweeps.jobs import Recorder, note_run
from kvbench.cli.sweeps.outcomes import describe_failure
from kvbench.cli.tasks.table import TASKS, load
from kvbench.cli.workers.sigterm import TERMINATED, wait_to_be_killed
from kvbench.cli.workers.status import show_all, show_status
from kvbench.core.config import ConfigError

COMPUTING = ("run", "evaluate", "bounds", "choose", "check", "calibrate", "profile", "train", "work")
"""Tasks that compute on `device`."""


def prepare() -> None:
    """Prepare this process and Hydra for the command line."""
    # Read when torch is loaded. Spinning threads would take processors from other runs on this machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # disable Ray's telemetry
    logging.captureWarnings(capture=True)
    ONCE.seen.clear()
    Plugins.instance().register(PluginSearchPath)


def configure_logging(hydra_cfg: HydraConf) -> None:
    """Configure logging as Hydra does.

    Raises:
        ConfigError: a level, handler or class does not exist.
    """
    try:
        configure_log(hydra_cfg.job_logging, hydra_cfg.verbose)  # type: ignore[arg-type]
    except (ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f"hydra.job_logging: {error} ({error.__cause__})") from None


def run_worker(words: list[str]) -> None:
    """Run a worker in a process of Slurm or Ray, and print its error.

    After SIGTERM the process waits to be killed: Slurm requeues no preempted job whose processes have all ended.

    Args:
        words: overrides without lists of values.
    """
    prepare()
    try:
        with allow_targets():
            run_alone(words)
    except (KeyboardInterrupt, SystemExit) as end:
        if isinstance(end, SystemExit) and end.code != TERMINATED:
            raise
        wait_to_be_killed()
    except Exception as error:
        describe_failure(error)


def run_alone(overrides: list[str]) -> None:
    """Run one job.

    `hydra.main` would compose the configuration three times, which takes a second.
    """
    with hydra_of_kvbench():
        check_search_path()
        cfg, hydra_cfg = compose_job(overrides)
        configure_logging(hydra_cfg)
        if not cfg.work.wait:
            raise ConfigError("work.wait=false: only for sweeps (-m) and task=work; leave it out")
        run_task(cfg)


def run_task(cfg: DictConfig) -> object:
    """Run the task of a composed configuration and return its result.

    Raises:
        ConfigError: a setting is wrong, or `runs_dir` cannot be written.
        Exception: any error of the task.
    """
    if cfg.get("task") == "status":
        if cfg.work.folder is None:
            show_all(CONSOLE, Path(cfg.runs_dir).expanduser())
        else:
            show_status(CONSOLE, Path(cfg.work.folder), verbose=cfg.verbose)
        return None
    for handler in logging.root.handlers:
        handler.addFilter(ONCE)
    count_processes(cfg)
    # Importing torch takes seconds, so it comes after finished calls and checks of settings.
    values = read_values(cfg)
    if cfg.get("task") == "run" and (folder := show_finished(values, verbose=cfg.verbose)) is not None:
        return folder
    settings = check_values(values)
    check_runs_dir(settings, alone=Recorder.current is None)
    is_single = HydraConfig.get().mode is not RunMode.MULTIRUN  # otherwise the sweep has printed it
    if settings.task in COMPUTING and is_single and os.environ.get("RANK", "0") == "0":
        show_device(cfg.device)
    if settings.task in COMPUTING:
        from kvbench.core.devices import keep_freed_memory  # imports torch

        keep_freed_memory()
    if settings.task == "work":
        from kvbench.cli.workers.work import work

        work(settings)
        return None
    return load(TASKS[settings.task])(cfg, settings)


def show_finished(values: Mapping[str, object], *, verbose: bool) -> Path | None:
    """Print the finished run of the same call and return its folder; None if there is none.

    If several processes share the model, only the first one prints; a job of a sweep does not.
    """
    if (outcome := find_finished(values)) is None:
        return None
    assert outcome.results is not None
    from kvbench.report.one_run import show_outcome  # imports numpy, which `--help` does not need

    note_run(outcome.folder, outcome.results.n)
    if Recorder.current is None and os.environ.get("RANK", "0") == "0":
        show_outcome(CONSOLE, outcome, verbose=verbose)
    return outcome.folder
