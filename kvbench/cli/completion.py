"""Tab completion of words that Hydra does not know: commands, tasks, metrics and variants of choices."""

from collections.abc import Iterable

from hydra.plugins.completion_plugin import CompletionPlugin

from kvbench.cli.config.compose import hydra_of_kvbench
from kvbench.cli.config.search_path import list_variants
from kvbench.cli.tasks.table import COMMANDS
from kvbench.core.settings import TASKS
from kvbench.core.suggestions import LISTS

ARGUMENTS = {"list": tuple(LISTS.values()), "new": ("method", "package")}
"""Words that may follow a command."""


def show_completions(line: str | None) -> bool:
    """Print completions of the last word of a line; return whether Hydra must add settings (also if `line` is None)."""
    found, is_setting = ([], True) if line is None else complete(line)
    for word in found:
        print(word)
    return is_setting


def complete(line: str) -> tuple[list[str], bool]:
    """Return completions of the last word of a command line, and whether Hydra may complete it as a setting, too.

    Args:
        line: the line up to the cursor, beginning with the executable.
    """
    rest = CompletionPlugin.strip_python_or_app_name(line)
    words = rest.split()
    last = words.pop() if words and not rest.endswith(" ") else ""
    known: Iterable[str] = () if words else COMMANDS
    is_command = bool(words) and words[0] in COMMANDS
    if is_command and len(words) == 1 and "=" not in last:
        known = ARGUMENTS.get(words[0], ())
    elif last.startswith("task="):
        known = (f"task={name}" for name in TASKS)
    elif (key := last.partition("=")[0]) == "metric" or key in LISTS:
        with hydra_of_kvbench():
            known = [f"{key}={name}" for name in list_variants("eval" if key == "metric" else key)]
    return [word for word in known if word.startswith(last)], not is_command
