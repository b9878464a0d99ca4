"""Table of tasks; the module of a task is imported when the task is run."""

from collections.abc import Callable
from importlib import import_module

from omegaconf import DictConfig

from kvbench.core.settings import Settings

TASKS = {
    "run": "kvbench.cli.tasks.run:run",
    "evaluate": "kvbench.cli.tasks.run:evaluate",
    "bounds": "kvbench.cli.tasks.run:run_bounds",
    "choose": "kvbench.cli.tasks.choose:choose",
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


def find_task(name: str) -> Callable[[DictConfig, Settings], object]:
    """Import and return the function of a task."""
    module, _, function = TASKS[name].partition(":")
    task: Callable[[DictConfig, Settings], object] = getattr(import_module(module), function)
    return task
