"""Tables of strings and metrics for the terminal, Markdown and CSV."""

import csv
import html
import io
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvbench.core.files import write_whole
from kvbench.eval.protocol.scores import Better, Metric
from kvbench.report.seeds import MeanMetric

Name = TypeVar("Name", bound=Hashable)
Cell = str | Metric | None
"""A string, a metric of a run, or nothing."""
Row = Mapping[str, Cell]
"""Cells by column; the rows of a table have the same columns."""
Style = Literal["value", "half", "range"]
"""Style of a metric: its value, value ± half of the 95 % interval, or value with the interval."""
ARROWS: Mapping[Better, str] = {"higher": "↑", "lower": "↓"}
PROMPTS_ONLY = "†"
"""Mark of an interval over prompts alone, where the one over prompts and seeds is wider than the metric's range."""
ASYMMETRY = 0.1
"""Difference of an interval's two parts around the value, relative to their mean, from which ends replace ±."""
WIDE_LEAD = 0.25
"""Share of a terminal's width above which row numbers may replace repeated columns that identify a row."""
HEADER_WIDTH = 11
"""Number of characters up to which a header is not broken."""
WIDTH = 120
"""Width in characters of a line of text of `Shown`."""


def publish(console: Console, title: str, rows: Sequence[Row], lead: int, path: Path, note: str = "") -> None:
    """Print a table and a note below it, write both as Markdown and print the path.

    The first `lead` columns identify a row.
    """
    print_line(console, "")
    print_rows(console, title, rows, lead)
    if note:
        print_line(console, note)
    write_whole(path, f"{title}\n\n{format_markdown(rows)}" + (f"\n{note}\n" if note else ""))
    console.print(f"written: {path}", highlight=False, soft_wrap=True)


def print_rows(console: Console, title: str, rows: Sequence[Row], lead: int, style: Style = "half") -> None:
    """Print a table.

    Columns that do not fit the terminal's width are printed in further blocks. The first `lead` columns, which identify
    a row, are repeated in each block, or replaced by the row's number if they are wide and this saves a block.
    """
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    forms = {name: choose_style(column, style) for name, column in columns.items()}
    cells = {name: [format_cell(cell, forms[name]) for cell in column] for name, column in columns.items()}
    longest = {name: max(map(len, cells[name])) for name in cells}
    headers = {name: stack_header(title, longest[name]) for name, title in name_columns(rows).items()}
    widths = {name: max(map(len, [*headers[name].split("\n"), *cells[name]])) for name in cells}
    left, blocks = list(cells)[:lead], [*split_columns(widths, lead, console.width)]
    row_numbers = [str(number) for number in range(1, len(rows) + 1)]
    numbered = [*split_columns({"": len(row_numbers[-1]), **widths}, 1, console.width)]
    if len(numbered) < len(blocks) and sum(widths[name] for name in left) > console.width * WIDE_LEAD:
        left, blocks = ["", *left], numbered
        cells, headers = {"": row_numbers, **cells}, {"": "", **headers}
    print_line(console, title, "italic")
    for names in blocks:
        if names is not blocks[0]:
            print_line(console, "")
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
        for name in names:
            justify: Literal["left", "right"] = "left" if name in left else "right"
            table.add_column(escape(headers[name]), justify=justify, overflow="fold")
        for texts in zip(*(cells[name] for name in names), strict=True):
            table.add_row(*map(escape, texts))
        console.print(table)


class Shown(ABC):
    """Base class of results that a terminal shows as text and a notebook as a table."""

    @abstractmethod
    def _list_rows(self) -> tuple[str, list[Row]]:
        """Return a title and the rows to show, whose first column identifies a row."""

    def __repr__(self) -> str:
        text = io.StringIO()
        print_rows(Console(file=text, width=WIDTH, color_system=None), *self._list_rows(), 1, "range")
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines() if line.strip())

    def _repr_html_(self) -> str:
        title, rows = self._list_rows()
        cells = [("th", [*name_columns(rows).values()])]
        cells += [("td", [format_cell(cell, "range") for cell in row.values()]) for row in rows]
        lines = ("".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in line) for tag, line in cells)
        return f"<table><caption>{html.escape(title)}</caption>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def print_line(console: Console, line: str, style: str = "dim") -> None:
    """Print a line as it is, without markup; a terminal breaks it between words."""
    console.print(line, style=style, markup=False, highlight=False, soft_wrap=not console.is_terminal)


def list_shown(rows: Sequence[Row]) -> list[Metric]:
    """Return the metrics in the cells of a table."""
    return [cell for row in rows for cell in row.values() if isinstance(cell, Metric)]


def drop_columns(rows: Sequence[Row], names: Collection[str]) -> list[Row]:
    """Return rows without the named columns."""
    return [{name: cell for name, cell in row.items() if name not in names} for row in rows]


def format_cell(cell: Cell, style: Style) -> str:
    """Return a cell as a string; a metric without a value shows its status."""
    if cell is None:
        return "-"
    if isinstance(cell, str):
        return cell
    if cell.value is None:
        return "-" if cell.status == "ok" else cell.status
    value, *ends = split_metric(cell, style)
    if not ends:
        return value
    shown = f"±{ends[0]}" if style == "half" else f"[{', '.join(ends)}]"
    return f"{value} {shown}{mark_interval(cell)}"


def split_metric(metric: Metric, style: Style) -> list[str]:
    """Return a metric's value, then half of its interval or both ends if it has one, each with the metric's digits."""
    assert metric.value is not None
    values = [metric.value]
    if metric.interval is not None and style != "value":
        low, high = metric.interval
        values += [(high - low) / 2] if style == "half" else [low, high]
    return [format_number(value, metric.digits) for value in values]


def choose_style(cells: Iterable[Cell], style: Style = "half") -> Style:
    """Return a column's style: `range` in place of `half` if an interval is asymmetric."""
    return "range" if style == "half" and any(map(_is_lopsided, cells)) else style


def _is_lopsided(cell: Cell) -> bool:
    """Return whether the two parts of an interval differ so much (`ASYMMETRY`) that ± misleads."""
    if not isinstance(cell, Metric) or cell.value is None or cell.interval is None:
        return False
    low, high = cell.interval
    return abs(high + low - 2 * cell.value) >= ASYMMETRY * (high - low) / 2 > 0


def mark_interval(metric: Metric, prompts_only: str = PROMPTS_ONLY, df: str = " df {}") -> str:
    """Return the text after an interval over runs: `df`, `prompts_only` if over prompts alone; else an empty string."""
    if not isinstance(metric, MeanMetric) or metric.df is None:
        return ""
    digits = 1 if metric.df < 10 else 0
    return prompts_only if metric.prompts_only else df.format(f"{metric.df:.{digits}f}".removesuffix(".0"))


def format_number(value: float, digits: int) -> str:
    """Return a number as text with `digits` decimals, without a minus before zero."""
    return f"{round(value, digits) + 0.0:.{digits}f}"


def format_name(name: str, metric: Metric) -> str:
    """Return a metric's name with an arrow towards better values."""
    return f"{name} {ARROWS[metric.better]}"


def find_best(rows: Sequence[Row], groups: Sequence[Hashable]) -> set[tuple[int, str]]:
    """Return the cells (row, column) with the best value of each metric within a group.

    Values are compared in the digits that are shown, so several can be best; a group of equal values has no best. Rows
    of the group None do not compete.
    """
    best: set[tuple[int, str]] = set()
    for column in rows[0] if rows else ():
        competing: dict[Hashable, dict[int, float]] = {}
        for index, (row, group) in enumerate(zip(rows, groups, strict=True)):
            cell = row[column]
            if group is not None and isinstance(cell, Metric) and cell.value is not None:
                sign = 1 if cell.better == "higher" else -1
                competing.setdefault(group, {})[index] = sign * round(cell.value, cell.digits)
        for values in competing.values():
            if len(set(values.values())) > 1:
                best |= {(index, column) for index, value in values.items() if value == max(values.values())}
    return best


def format_markdown(rows: Sequence[Row], best: Collection[tuple[int, str]] = ()) -> str:
    """Return rows, at least one, as a Markdown table with intervals; the cells (row, column) in `best` are bold."""
    head = [_escape_cell(title) for title in name_columns(rows).values()]
    lines = [head]
    for index, row in enumerate(rows):
        texts = {name: _escape_cell(format_cell(cell, "range")) for name, cell in row.items()}
        lines.append([f"**{text}**" if (index, name) in best else text for name, text in texts.items()])
    first, *others = ("| " + " | ".join(line) + " |\n" for line in lines)
    return "".join([first, "|" + "---|" * len(head) + "\n", *others])


def escape_markdown(text: str) -> str:
    """Return a text on one line, in which neither a heading nor HTML, code or a link of Markdown can begin."""
    line = "".join(letter if letter.isprintable() else " " for letter in text)
    for letter, shown in (("\\", "\\\\"), ("<", "&lt;"), ("`", "'"), ("](", "]\\(")):
        line = line.replace(letter, shown)
    return line


def _escape_cell(text: str) -> str:
    return escape_markdown(text).replace("|", "\\|")


def format_csv(rows: Sequence[Row]) -> str:
    """Return one or more rows as CSV: value and interval of each metric, with all digits.

    A metric over several runs has two more columns: degrees of freedom and method of its interval.
    """
    columns: list[str] = []
    for name in rows[0]:
        kinds = {type(row[name]) for row in rows}
        columns += [name, *([f"{name} low", f"{name} high"] if kinds & {Metric, MeanMetric} else [])]
        columns += [f"{name} df", f"{name} interval"] if MeanMetric in kinds else []
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns, restval="")
    writer.writeheader()
    for row in rows:
        cells: dict[str, str | float | None] = {}
        for name, cell in row.items():
            if isinstance(cell, Metric):
                low, high = cell.interval or (None, None)
                cells |= {name: cell.value, f"{name} low": low, f"{name} high": high}
                if f"{name} df" in columns:
                    cells |= {f"{name} df": getattr(cell, "df", None), f"{name} interval": cell.ci}
            else:
                cells[name] = cell
        writer.writerow(cells)
    return buffer.getvalue()


def name_columns(rows: Sequence[Row]) -> dict[str, str]:
    """Return the title of each column; a metric's has an arrow towards better values."""
    metrics = {name: cell for row in rows for name, cell in row.items() if isinstance(cell, Metric)}
    return {name: format_name(name, metrics[name]) if name in metrics else name for name in rows[0]}


def stack_header(header: str, width: int) -> str:
    """Break a header into lines: at every comma and " / ", and elsewhere to fit the `width` of its cells."""
    width, lines = max(width, HEADER_WIDTH), []
    for part in re.split(r"(?<=,) | / ", header):
        lines.append("")
        for piece in re.split(r"(?<=_)|(?<= )(?![↑↓])|(?=\[)", part):
            if lines[-1] and len((lines[-1] + piece).rstrip()) > width:
                lines.append("")
            lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines)


def split_columns(widths: Mapping[Name, int], lead: int, width: int) -> Iterator[list[Name]]:
    """Yield blocks of columns that fit `width` with gaps of two spaces; each begins with the `lead` first columns."""
    names = list(widths)
    block = names[:lead]
    for name in names[lead:]:
        if len(block) > lead and sum(widths[n] + 2 for n in (*block, name)) - 1 > width:
            yield block
            block = names[:lead]
        block = [*block, name]
    yield block
