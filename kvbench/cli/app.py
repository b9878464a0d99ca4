"""Command line of kvbench: `python run.py method=heatkv budget=0.04`."""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import hydra
from omegaconf import DictConfig

from kvbench.cli.completion import show_completions
from kvbench.cli.config.command import Command
from kvbench.cli.config.compose import hydra_of_kvbench
from kvbench.cli.config.help import HELP, read_help
from kvbench.cli.config.instantiate import VERSION_BASE, allow_targets
from kvbench.cli.config.loader import find_model_choices
from kvbench.cli.config.messages import check_arguments, describe_error, is_expected
from kvbench.cli.config.search_path import check_search_path
from kvbench.cli.config.words import check_words, parse_options
from kvbench.cli.console import describe_version, say, stop
from kvbench.cli.dispatch import configure_logging, prepare, run_alone, run_task
from kvbench.cli.launch import run_sweep, run_workers
from kvbench.cli.sweeps.folder import announce, compose_sweep, list_checked, list_worker_words
from kvbench.cli.tasks.table import COMMANDS, load
from kvbench.cli.workers.control import control
from kvbench.cli.workers.sigterm import INTERRUPTED, RESUME, TERMINATED, Terminated
from kvbench.core.config import ConfigError
from kvbench.core.settings import TASKS
from kvbench.core.suggestions import find_near
from kvbench.runs.record.sweeps import read_entries


def main() -> None:
    """Run the command line: one job, a sweep (`-m`), a command of `COMMANDS`, or an option of Hydra (`--help`)."""
    prepare()
    try:
        with allow_targets():
            run_command(Command.parse(sys.argv[1:]))
    except KeyboardInterrupt as interrupt:
        print(RESUME, file=sys.stderr)
        sys.exit(TERMINATED if isinstance(interrupt, Terminated) else INTERRUPTED)
    except Exception as error:
        if not is_expected(error):
            raise
        stop(describe_error(error, sys.argv[1:]))


def run_command(command: Command) -> None:
    """Run a parsed command line as its kind requires.

    Raises:
        ConfigError: the first word is not a command, or an override has no effect.
    """
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
    if re.fullmatch(r"[A-Za-z]\w*", verb):
        near = find_near(verb.lower(), (*COMMANDS, *TASKS))
        meant = "" if near is None else f" did you mean {'task=' * (near in TASKS)}{near}?"
        there = f"there are {', '.join(COMMANDS)}; settings are key=value (kvbench --help)"
        raise ConfigError(f"{verb}: no such command;{meant} {there}")
    check_words(command)
    if command.kind in ("job", "all"):
        run_alone(overrides)
    elif command.kind == "sweep":
        run_on_sweep(overrides)
    elif command.kind == "jobs":
        run_jobs(overrides)
    else:
        run_by_hydra(list(command.words))


def show_help(command: Command) -> bool:
    """Print the introduction, the help, or the keys of a task or method; return whether the command asks for one."""
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


def run_jobs(words: list[str]) -> None:
    """Check the jobs of a sweep, and run them."""
    check_first(announce(words))
    if (problem := check_arguments(["-m", *words])) is not None:
        stop(problem)
    with hydra_of_kvbench():
        run_sweep(words)


def run_by_hydra(arguments: list[str]) -> None:
    """Run an option of Hydra, such as `--cfg`."""
    if (problem := check_arguments(arguments)) is not None:
        stop(problem)
    if (parsed := parse_options(arguments)).multirun and parsed.cfg:  # Hydra would ignore one of them
        announce(parsed.overrides, every=True)
        return
    if parsed.shell_completion and not show_completions(os.environ.get("COMP_LINE")):
        return
    options = [word for word in arguments if word not in parsed.overrides]  # Hydra parses no mixed order
    sys.argv[1:] = [*options, *parsed.overrides]
    if not parsed.shell_completion:
        with hydra_of_kvbench():
            sys.argv += find_model_choices(parsed.overrides)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises errors instead of printing them in several lines
    _run_by_hydra()


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
        folder = Path(cfg.work.folder)
        if cfg.task == "work" and cfg.work.do is not None:
            say(control(folder, cfg.work.do, cfg.work.run))
            return
        if cfg.task != "work":
            run_task(cfg)
            return
        check_first(list_checked(cfg, folder, [entry.overrides for entry in read_entries(folder)]))
        run_workers(cfg, hydra_cfg.runtime.choices, list_worker_words(cfg, words))


@hydra.main(config_path="pkg://kvbench.conf", config_name="config", **VERSION_BASE)
def _run_by_hydra(cfg: DictConfig) -> None:
    """Run the job of `--run`; Hydra handles all other options itself."""
    run_task(cfg)
