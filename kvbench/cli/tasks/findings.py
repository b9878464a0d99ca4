"""Findings of `task=check` and `task=doctor`, printed as a table."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from rich.table import Table

from kvbench.cli.console import CONSOLE
from kvbench.core.config import ConfigError

COLOURS = {"ok": "green", "note": "yellow", "error": "red"}
"""Colour of each state."""


class Finding(NamedTuple):
    """Result of one check; with state `error` the run cannot start, with `note` it can."""

    subject: str
    state: Literal["ok", "note", "error"]
    text: str


def show_findings(findings: Sequence[Finding]) -> None:
    """Print a table of findings.

    Raises:
        ConfigError: the state of a finding is `error`.
    """
    table = Table(box=None, show_header=False)
    for finding in findings:
        table.add_row(finding.subject, f"[{COLOURS[finding.state]}]{finding.state}[/]", finding.text)
    CONSOLE.print(table)
    if errors := [finding.subject for finding in findings if finding.state == "error"]:
        raise ConfigError(f"task=check: the run cannot start: {', '.join(errors)}")
