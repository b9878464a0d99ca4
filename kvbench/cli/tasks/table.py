"""Table of tasks; the module of a task is imported when the task is run."""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from omegaconf import DictConfig

from kvbench.core.settings import Settings

TASKS = {
    "run": "kvbench.cli.tasks.run:run",
    "evaluate": "kvbench.cli.tasks.run:evaluate",
    "bounds": "kvbench.cli.tasks.run:run_bounds",
    "choose": "kvbench.extras.race.task:choose",
    "plan": "kvbench.cli.tasks.plan:plan",
    "check": "kvbench.cli.tasks.check:check",
    "doctor": "kvbench.cli.tasks.doctor:doctor",
    "weights": "kvbench.cli.tasks.weights:fetch_weights",
    "calibrate": "kvbench.cli.tasks.calibrate:calibrate",
    "profile": "kvbench.cli.tasks.profile:profile",
    "train": "kvbench.cli.tasks.train:train",
    "report": "kvbench.cli.tasks.report:report",
    "dashboard": "kvbench.cli.tasks.dashboard:write_page",
    "export": "kvbench.cli.tasks.export:export",
    "merge": "kvbench.cli.tasks.merge:merge",
}
"""Module and function of each task that runs on a job's configuration; `work` and `status` are about a sweep."""

COMMANDS = {
    "list": "kvbench.cli.tasks.listing:show_list",
    "show": "kvbench.cli.tasks.show:show",
    "publish": "kvbench.extras.share.publish.command:publish",
    "verify": "kvbench.extras.share.verify.command:verify",
    "new": "kvbench.cli.tasks.new:new",
}
"""Module and function of each command that composes no configuration; False means that it found a fault."""


def find_task(name: str) -> Callable[[DictConfig, Settings], object]:
    """Import and return the function of a task."""
    task: Callable[[DictConfig, Settings], object] = _find(TASKS[name])
    return task


def find_command(name: str) -> Callable[[Sequence[str]], object]:
    """Import and return the function of a command, whose argument is the words after its name."""
    command: Callable[[Sequence[str]], object] = _find(COMMANDS[name])
    return command


def _find(place: str) -> Any:
    module, _, function = place.partition(":")
    return getattr(import_module(module), function)
