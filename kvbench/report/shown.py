"""Results that show their figures as text, and as a table in a notebook."""

import io
from abc import ABC, abstractmethod
from html import escape

from rich.console import Console

from kvbench.report.tables import Row, format_cell, name_columns, print_rows

WIDTH = 120
"""Characters of a line of text."""


class Shown(ABC):
    """Base class of results that a terminal shows as text and a notebook as a table."""

    @abstractmethod
    def _list_rows(self) -> tuple[str, list[Row]]:
        """Return a title and what is shown, whose first column identifies a row."""

    def __repr__(self) -> str:
        text = io.StringIO()
        print_rows(Console(file=text, width=WIDTH, color_system=None), *self._list_rows(), 1, "range")
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines() if line.strip())

    def _repr_html_(self) -> str:
        title, rows = self._list_rows()
        cells = [("th", [*name_columns(rows).values()])]
        cells += [("td", [format_cell(cell, "range") for cell in row.values()]) for row in rows]
        lines = ("".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in line) for tag, line in cells)
        return f"<table><caption>{escape(title)}</caption>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
