"""Results that show their figures as text, and as a table in a notebook."""

import io
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from rich.console import Console

from kvbench.report.tables import Row, format_cell, name_columns, print_rows

WIDTH = 120
"""Characters of a line of text."""


class Figures(NamedTuple):
    """Table of results.

    Attributes:
        title: what they are.
        rows: at least one.
        lead: number of columns that identify a row.
        notes: lines below the table.
    """

    title: str
    rows: Sequence[Row]
    lead: int
    notes: Sequence[str] = ()


class Shown(ABC):
    """Base class of results that a terminal shows as text and a notebook as a table."""

    @abstractmethod
    def _list_figures(self) -> Figures:
        """Return what is shown."""

    def __repr__(self) -> str:
        figures, text = self._list_figures(), io.StringIO()
        console = Console(file=text, width=WIDTH, color_system=None)
        print_rows(console, figures.title, figures.rows, figures.lead, "range")
        lines = [line.rstrip() for line in text.getvalue().splitlines()]
        return "\n".join(filter(None, (*lines, *figures.notes)))

    def _repr_html_(self) -> str:
        title, rows, _, notes = self._list_figures()
        body = [_write_row("th", name_columns(rows).values())]
        body += [_write_row("td", [format_cell(cell, "range") for cell in row.values()]) for row in rows]
        below = "".join(f"<p>{escape(note)}</p>" for note in notes)
        return f"<table><caption>{escape(title)}</caption>{''.join(body)}</table>{below}"


def _write_row(tag: str, cells: Iterable[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"
