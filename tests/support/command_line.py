"""What a call of the command line left behind."""

import re
from collections.abc import Callable

Command = Callable[..., tuple[int, str, str]]
"""Runs the command line in this process; gives exit status, standard output and standard error."""


def errors(err: str) -> list[str]:
    """What is left of standard error without progress bars."""
    return [
        line for line in re.split(r"[\n\r]", err) if line.strip() and "it/s" not in line and "|" not in line
    ]
