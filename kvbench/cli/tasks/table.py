"""Table of tasks and commands, whose modules are imported when they are run."""

from importlib import import_module
from typing import Any

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
"""`module:function` of each task on a job, called with configuration and settings; `work` and `status` have none."""

COMMANDS = {
    "list": "kvbench.cli.tasks.listing:show_list",
    "show": "kvbench.cli.tasks.show:show",
    "publish": "kvbench.extras.share.publish.command:publish",
    "verify": "kvbench.extras.share.verify.command:verify",
    "new": "kvbench.cli.tasks.new:new",
}
"""`module:function` of each command; the function takes the words after the name and may return False (failed)."""


def load(place: str) -> Any:
    """Import and return the function of a task or of a command."""
    module, _, function = place.partition(":")
    return getattr(import_module(module), function)
