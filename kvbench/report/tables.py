"""Tables: rows of texts and metrics, on the terminal, as Markdown and as CSV."""

import csv
import io
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvbench.core.files import write_whole
from kvbench.eval.protocol.scores import Better, Metric

Cell = str | Metric | None
"""A text, a metric of a run, or nothing."""
Row = Mapping[str, Cell]
"""Cells by column; the rows of a table have the same columns."""
Style = Literal["value", "half", "range"]
"""Forms of a metric in a table: value, value ± half of its 95 % interval, or value with the interval."""
ARROWS: Mapping[Better, str] = {"higher": "↑", "lower": "↓"}
SHORT = 11
"""Characters up to which a column's header stays on one line."""


def publish(console: Console, title: str, rows: Sequence[Row], lead: int, path: Path) -> None:
    """Print a table, write it as Markdown, and say where.

    Args:
        console: where to print.
        title: one line above the table.
        rows: at least one.
        lead: number of columns that say what a row is about.
        path: the Markdown file.
    """
    print_rows(console, title, rows, lead)
    write_whole(path, f"{title}\n\n{format_markdown(rows)}")
    console.print(f"written: {path}", highlight=False, soft_wrap=True)


def print_rows(console: Console, title: str, rows: Sequence[Row], lead: int, style: Style = "half") -> None:
    """Print a table.

    Columns that do not fit beside each other stand below each other, in blocks that all begin with the leading ones.

    Args:
        console: where to print.
        title: one line above the table.
        rows: at least one.
        lead: number of columns that say what a row is about.
        style: what is written of metrics.
    """
    cells = {name: [format_cell(row[name], style) for row in rows] for name in rows[0]}
    headers = {name: _stack(_header(name, rows), max(map(len, cells[name]))) for name in cells}
    widths = {name: max(map(len, [*headers[name].split("\n"), *cells[name]])) for name in cells}
    console.print(title, style="italic", markup=False, highlight=False, soft_wrap=True)
    for names in _split_columns(widths, lead, console.width):
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for place, name in enumerate(names):
            justify: Literal["left", "right"] = "left" if place < lead else "right"
            table.add_column(escape(headers[name]), justify=justify, overflow="fold")
        for texts in zip(*(cells[name] for name in names), strict=True):
            table.add_row(*map(escape, texts))
        console.print(table)


def drop_columns(rows: Sequence[Row], names: Collection[str]) -> list[Row]:
    """Return the rows without some columns."""
    return [{name: cell for name, cell in row.items() if name not in names} for row in rows]


def format_cell(cell: Cell, style: Style) -> str:
    """Write a cell; of a metric without a value what became of it."""
    if cell is None:
        return "-"
    if isinstance(cell, str):
        return cell
    if cell.value is None:
        return "-" if cell.status == "ok" else cell.status
    text = format_number(cell.value, cell.digits)
    if cell.interval is None or style == "value":
        return text
    low, high = cell.interval
    if style == "half":
        return f"{text} ±{(high - low) / 2:.{cell.digits}f}"
    return f"{text} [{format_number(low, cell.digits)}, {format_number(high, cell.digits)}]"


def format_number(value: float, digits: int) -> str:
    """Write a number with so many digits after the point, and no minus before a zero."""
    return f"{round(value, digits) + 0.0:.{digits}f}"


def format_name(name: str, metric: Metric) -> str:
    """Write a metric's name with an arrow in the direction that is better."""
    return f"{name} {ARROWS[metric.better]}"


def format_markdown(rows: Sequence[Row], best: Collection[tuple[int, str]] = ()) -> str:
    """Write rows, at least one, as a Markdown table with intervals as ranges, and some cells (row, column) in bold."""
    head = [_header(name, rows) for name in rows[0]]
    lines = [head]
    for place, row in enumerate(rows):
        texts = {name: format_cell(cell, "range") for name, cell in row.items()}
        lines.append([f"**{text}**" if (place, name) in best else text for name, text in texts.items()])
    first, *others = ("| " + " | ".join(line) + " |\n" for line in lines)
    return "".join([first, "|" + "---|" * len(head) + "\n", *others])


def format_csv(rows: Sequence[Row]) -> str:
    """Write rows, at least one, as CSV: of a metric the value and both ends of its interval, with all digits."""
    metrics = [name for name in rows[0] if any(isinstance(row[name], Metric) for row in rows)]
    columns = [c for n in rows[0] for c in ([n, f"{n} low", f"{n} high"] if n in metrics else [n])]
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns, restval="")
    writer.writeheader()
    for row in rows:
        numbers: dict[str, str | float | None] = {}
        for name, cell in row.items():
            if isinstance(cell, Metric):
                low, high = cell.interval or (None, None)
                numbers |= {name: cell.value, f"{name} low": low, f"{name} high": high}
            else:
                numbers[name] = cell
        writer.writerow(numbers)
    return buffer.getvalue()


def _header(name: str, rows: Sequence[Row]) -> str:
    metrics = [row[name] for row in rows]
    return next((format_name(name, one) for one in metrics if isinstance(one, Metric)), name)


def _stack(header: str, width: int) -> str:
    """Break a header into lines: at every comma and slash between spaces, elsewhere as its cells' `width` wants it."""
    width, lines = max(width, SHORT), []
    for part in re.split(r"(?<=,) | / ", header):
        lines.append("")
        for piece in re.split(r"(?<=_)|(?<= )(?![↑↓])|(?=\[)", part):
            if lines[-1] and len((lines[-1] + piece).rstrip()) > width:
                lines.append("")
            lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines)


def _split_columns(widths: Mapping[str, int], lead: int, width: int) -> Iterator[list[str]]:
    """Deal columns to blocks that fit `width`, each behind the leading ones."""
    names = list(widths)
    block = names[:lead]
    for name in names[lead:]:
        if len(block) > lead and sum(widths[n] + 2 for n in (*block, name)) + 1 > width:
            yield block
            block = names[:lead]
        block = [*block, name]
    yield block
