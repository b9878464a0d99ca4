"""The terminal console for tables, and lines about this installation."""

import logging
import os
import sys
from shutil import get_terminal_size
from textwrap import fill
from typing import ClassVar, NoReturn, TextIO

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


class Filled(logging.Formatter):
    """Formatter of log records for stdout, whose lines are broken as `fill_lines` does."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as text."""
        return fill_lines(super().format(record), sys.stdout)


def fill_lines(text: str, stream: TextIO) -> str:
    """Return text, wrapped at word boundaries if the stream is a terminal; long words stay whole."""
    if not stream.isatty():
        return text
    width = get_terminal_size().columns
    lines = (fill(line, width, break_long_words=False, break_on_hyphens=False) for line in text.split("\n"))
    return "\n".join(lines)


def say(line: str, style: str | None = None) -> None:
    """Print a line as it is: without markup, highlights or breaks at the terminal's width."""
    CONSOLE.print(line, style=style, highlight=False, markup=False, soft_wrap=True)


def stop(problem: str) -> NoReturn:
    """End the process with an error message, wrapped at word boundaries on a terminal."""
    sys.exit(fill_lines(f"error: {problem}", sys.stderr))


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
