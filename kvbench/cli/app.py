"""Command line of kvbench: `python run.py method=heatkv budget=0.04`."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from kvbench.cli.completion import show_completions
from kvbench.cli.config.command import Command
from kvbench.cli.config.compose import compose_job, hydra_of_kvbench
from kvbench.cli.config.help import HELP, check_verb, read_help
from kvbench.cli.config.instantiate import VERSION_BASE, allow_targets
from kvbench.cli.config.loader import find_model_choices
from kvbench.cli.config.messages import check_arguments
from kvbench.cli.config.search_path import check_search_path
from kvbench.cli.config.words import check_words, parse_options
from kvbench.cli.console import describe_version, say, stop
from kvbench.cli.dispatch import configure_logging, prepare, run_alone, run_task
from kvbench.cli.streams import repair_streams
from kvbench.cli.submit.slurm import submit
from kvbench.cli.submit.summary import Summary, show_sweep, start_in_background, start_workers, watch_jobs
from kvbench.cli.sweeps.extend import extend_sweeper
from kvbench.cli.sweeps.folder import announce, compose_sweep, list_checked, list_worker_words
from kvbench.cli.sweeps.jobs import Recorder, label_sweep, read_entries
from kvbench.cli.sweeps.launchers import SLURM, check_launcher
from kvbench.cli.sweeps.outcomes import describe_failure, exiting_on_error
from kvbench.cli.tasks.table import COMMANDS, load
from kvbench.cli.workers.control import control
from kvbench.cli.workers.sigterm import INTERRUPTED, RESUME, TERMINATED, Terminated, interrupting_on_sigterm
from kvbench.core.config import ConfigError

if TYPE_CHECKING:  # submitit belongs to an extra
    from submitit import Job


def main() -> None:
    """Run the command line: one job, a sweep (`-m`), a command of `COMMANDS`, or an option of Hydra (`--help`)."""
    prepare()
    try:
        with allow_targets(), exiting_on_error():
            run_command(Command.parse(sys.argv[1:]))
    except KeyboardInterrupt as interrupt:
        print(RESUME, file=sys.stderr)
        sys.exit(TERMINATED if isinstance(interrupt, Terminated) else INTERRUPTED)


def run_command(command: Command) -> None:
    """Run a parsed command line as its kind requires."""
    overrides = list(command.overrides)
    if "--version" in command.words:
        print(describe_version())
        return
    if show_help(command):
        return
    if (verb := command.words[0]) in COMMANDS:
        place, words = COMMANDS[verb], command.words[1:]
        if {"-h", "--help"} & {*words}:
            print(f"usage: {load(place.partition(':')[0] + ':USAGE')}")
        elif load(place)(words) is False:
            sys.exit(1)
        return
    check_verb(verb, COMMANDS)
    check_words(command)
    if command.kind in ("job", "all"):
        run_alone(overrides)
    elif command.kind == "sweep":
        run_on_sweep(overrides)
    elif command.kind == "jobs":
        run_by_hydra(["-m", *overrides])
    else:
        run_by_hydra(list(command.words))


def show_help(command: Command) -> bool:
    """Print the introduction, the help, or the keys of a task or method; return False if the command asks for none."""
    topics = [word.split("=", 1) for word in command.overrides if word.startswith(("task=", "method="))]
    if not command.words:
        opening, examples, *_, closing = read_help().split("\n\n")
        print("\n\n".join((opening, examples, closing)))
    elif len(command.words) == 1 and command.words[0] in HELP:
        print(read_help())
    elif topics and not {*HELP}.isdisjoint(command.options):
        load("kvbench.cli.tasks.keys:show_keys")(*topics[0])
    else:
        return False
    return True


def run_by_hydra(arguments: list[str]) -> None:
    """Run a sweep or an option of Hydra, such as `--cfg`."""
    if (command := Command.parse(arguments)).kind == "jobs":
        check_first(announce(command.overrides))
    if (problem := check_arguments(arguments)) is not None:
        stop(problem)
    if (parsed := parse_options(arguments)).multirun and parsed.cfg:  # Hydra would ignore one of them
        announce(parsed.overrides, every=True)
        return
    if parsed.shell_completion and not show_completions(os.environ.get("COMP_LINE")):
        return
    options = [word for word in arguments if word not in parsed.overrides]  # Hydra wants them apart
    arguments = [*options, *parsed.overrides]
    if not (parsed.multirun or parsed.shell_completion):
        with hydra_of_kvbench():
            arguments += find_model_choices(parsed.overrides)
    extend_sweeper()
    sys.argv[1:] = arguments
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises errors instead of printing them in several lines
    try:
        with interrupting_on_sigterm():
            _run_by_hydra()
    except KeyboardInterrupt:
        Summary.stop()
        raise
    except Exception as error:
        if Summary.running is None:
            raise
        describe_failure(error)
    finally:
        if Summary.running is not None:  # the launcher broke before it reported all jobs
            Summary.running.show()


def check_first(jobs: Sequence[Sequence[str]]) -> None:
    """Check the jobs of a sweep, which imports torch; do nothing without jobs."""
    if jobs:
        load("kvbench.cli.tasks.check:check_jobs")(jobs)


def run_on_sweep(words: list[str]) -> None:
    """Run a task on a sweep as a whole: work on its jobs, control them, show their status or report their runs."""
    with hydra_of_kvbench():
        check_search_path()
        cfg, hydra_cfg = compose_sweep(words)
        configure_logging(hydra_cfg)
        choices, folder = hydra_cfg.runtime.choices, Path(cfg.work.folder)
        alone = choices["hydra/launcher"] == "basic"
        if cfg.task == "work" and cfg.work.do is not None:
            say(control(folder, cfg.work.do, cfg.work.run))
            return
        if cfg.task != "work":
            run_task(cfg)
            return
        check_first(list_checked(cfg, folder, [entry.overrides for entry in read_entries(folder)]))
        workers = list_worker_words(cfg, words)
        jobs = prepare_workers(cfg, choices["hydra/launcher"], workers)
        if not cfg.work.wait:
            return
        if alone or jobs:
            with watch_jobs(cfg, folder):
                if alone:
                    run_task(cfg)
                for job in jobs:
                    job.wait()
    if not (alone or jobs):
        with watch_jobs(cfg, folder):
            run_by_hydra(["-m", *workers, f"work.number=range({cfg.work.workers})"])
    if not show_sweep(cfg, folder, label_sweep(folder, choices.get("sweeps"))):
        sys.exit(1)


def prepare_workers(cfg: DictConfig, launcher: str, workers: list[str]) -> "Sequence[Job[None]]":
    """Check that a launcher can start workers; start them if the command does not wait, and queue Slurm's.

    Args:
        cfg: configuration of the sweep.
        launcher: choice of `hydra/launcher`.
        workers: command-line words of a worker.

    Returns:
        The jobs in Slurm's queue that the command waits for.

    Raises:
        ConfigError: the launcher cannot start them.
    """
    if launcher == "basic":
        if cfg.work.workers > 1:
            raise ConfigError(
                f"work.workers={cfg.work.workers}: hydra/launcher=basic starts one worker; set hydra/launcher=joblib, "
                "or leave out work.workers and start this command once per worker"
            )
        if not cfg.work.wait:
            start_in_background(Path(cfg.work.folder))
        return []
    launched = hydra.compose("config", overrides=workers, return_hydra_config=True)
    check_launcher(launched)
    if not cfg.work.wait:
        start_workers(launched, Path(cfg.work.folder), workers, cfg.work.workers)
        return []
    return submit(launched, workers, cfg.work.workers) if launcher == SLURM else []


def run_job(cfg: DictConfig) -> object:
    """Run one job of a sweep; return its task's result, or the reason of its failure.

    Not decorated, because launchers pickle it by name. Hydra composes it without the choices of the model's file.
    """
    repair_streams()  # this may be a launcher's process
    recorder, own = Recorder.current, HydraConfig.instance().cfg
    try:
        if recorder is not None and recorder.is_dropped():
            return None
        overrides = HydraConfig.get().overrides
        with hydra_of_kvbench():
            cfg, _ = compose_job([*overrides.hydra, *overrides.task])
            HydraConfig.instance().cfg = own
        return run_task(cfg)
    except Exception as error:
        if HydraConfig.get().mode is not RunMode.MULTIRUN:
            raise
        return describe_failure(error)


_run_by_hydra = hydra.main(config_path="pkg://kvbench.conf", config_name="config", **VERSION_BASE)(run_job)
