"""The terminal console for tables, and lines about this installation."""

import logging
import os
import sys
from typing import ClassVar, NoReturn

from rich.console import Console

from kvbench.core.checkout import find_built_commit, run_git
from kvbench.core.gpus import AUTO, resolve_device
from kvbench.version import __version__

FILE_WIDTH = 160
"""Characters of a line in a file or a pipe if `COLUMNS` is not set."""
ASKED = os.environ.get("COLUMNS", "")
CONSOLE = Console(width=None if sys.stdout.isatty() else int(ASKED if ASKED.isdecimal() else 0) or FILE_WIDTH)


class WarnOnceFilter(logging.Filter):
    """Filter that passes each warning once: jobs of a sweep share references, calibrations and settings.

    Attributes:
        seen: lines of this command.
    """

    seen: ClassVar[set[str]] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to print a record; a warning is printed only once."""
        line = record.getMessage()
        is_new = record.levelno != logging.WARNING or line not in self.seen
        self.seen.add(line)
        return is_new


ONCE = WarnOnceFilter()


def say(line: str, style: str | None = None) -> None:
    """Print a line as it is: without markup, highlights or breaks at the terminal's width."""
    CONSOLE.print(line, style=style, highlight=False, markup=False, soft_wrap=True)


def stop(problem: str) -> NoReturn:
    """End the process with an error message."""
    sys.exit(f"error: {problem}")


def show_device(name: str) -> None:
    """Print the device that `device=auto` resolves to; print nothing for other values."""
    if name == AUTO:
        device = resolve_device(name)
        reason = f"{'no ' if device == 'cpu' else ''}GPU found"
        say(f"device: {device} ({'KVBENCH_DEVICE' if os.environ.get('KVBENCH_DEVICE') else reason})")


def describe_version() -> str:
    """Return the version, with the commit if it is known and whether files that git tracks differ from it."""
    describe = ("describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=, with changes")
    commit = find_built_commit() or run_git(*describe)
    return f"kvbench {__version__}" + (f" (commit {commit.strip()})" if commit else "")
