"""Tables for a paper in LaTeX: a block of columns for each metric, divided so that each table fits a page."""

from collections.abc import Sequence
from pathlib import Path

from kvbench.core.files import write_whole
from kvbench.report.latex import ARROWS, MAX_LETTERS, divide_rows, join_latex, write_cell, write_tables
from kvbench.report.latex_letters import escape
from kvbench.report.paper_tables import PaperTable
from kvbench.report.tables import Style, choose_style, format_cell, split_columns
from kvbench.runs.record.folder import slug

Column = tuple[str, str]
"""A metric and a label."""


def format_paper_table(table: PaperTable) -> str:
    """Return a table as one or several LaTeX tables, with whole metrics in each where these fit the text width."""
    leads = [escape(row) for row in table.rows]
    bodies = []
    for columns in _split_metrics(table):
        cells = [_write_cells(table, row, columns) for row in table.rows]
        head = _write_heads(table, columns)
        for start, stop in divide_rows(len(leads)):
            body = list(head)
            for place in range(start, stop):
                if place > start and place == len({row for row, _ in table.whole}):
                    body.append(r"\midrule")
                body.append(" & ".join([leads[place], *cells[place]]) + r" \\")
            bodies.append(("l" + "r" * len(columns), body))
    return "\n".join(write_tables(bodies, table.caption, slug(table.title)))


def _split_metrics(table: PaperTable) -> list[list[Column]]:
    """Return the columns of each table: as many metrics as fit, or a part of one that does not fit."""
    tables: list[list[Column]] = [[]]
    for name in table.metrics:
        columns = [(name, label) for label in table.columns]
        blocks = list(split_columns(_count_letters(table, [*tables[-1], *columns]), 1, MAX_LETTERS))
        if len(blocks) == 1:
            tables[-1] += columns
        else:
            blocks = list(split_columns(_count_letters(table, columns), 1, MAX_LETTERS))
            tables += [block[1:] for block in blocks]
    return [columns for columns in tables if columns]


def _count_letters(table: PaperTable, columns: Sequence[Column]) -> dict[Column, int]:
    """Return the widths of the leading column and of others; a metric's name may be wider than its columns."""
    widths = {("", ""): max(map(len, (*table.rows, table.head)))}
    for name, label in columns:
        cells = [table.cells.get((row, name, label)) for row in table.rows]
        style = _choose_style(table, name)
        widths[name, label] = max(len(label), *(len(format_cell(cell, style)) for cell in cells))
    for name in dict.fromkeys(name for name, _ in columns):
        own = [column for column in columns if column[0] == name]
        room = sum(widths[column] + 2 for column in own) - 2
        widths[own[-1]] += max(0, len(name) + len(table.metrics[name].unit) + 5 - room)
    return widths


def _choose_style(table: PaperTable, metric: str) -> Style:
    """Return the one form of a metric's intervals."""
    cells = (*table.cells.items(), *table.whole.items())
    return choose_style(cell for place, cell in cells if place[1] == metric)


def _write_heads(table: PaperTable, columns: Sequence[Column]) -> list[str]:
    """Return the lines of the head: metrics over their columns, rules, and labels."""
    names = list(dict.fromkeys(name for name, _ in columns))
    counts = [sum(other == name for other, _ in columns) for name in names]
    above = []
    for name, n in zip(names, counts, strict=True):
        unit, arrow = escape(table.metrics[name].unit), ARROWS[table.metrics[name].better]
        above.append(rf"\multicolumn{{{n}}}{{c}}{{{escape(name)}{f' ({unit})' * bool(unit)} {arrow}}}")
    ends = [1 + sum(counts[: place + 1]) for place in range(len(counts))]
    rules = [rf"\cmidrule(lr){{{end - n + 1}-{end}}}" for end, n in zip(ends, counts, strict=True)]
    labels = [table.head, *(escape(label) for _, label in columns)]
    return [" & ".join(["", *above]) + r" \\", " ".join(rules), " & ".join(labels) + r" \\", r"\midrule"]


def _write_cells(table: PaperTable, row: str, columns: Sequence[Column]) -> list[str]:
    """Return the cells of a row; the value of an uncompressed run spans the columns of its metric."""
    cells = []
    for place, (name, label) in enumerate(columns):
        style = _choose_style(table, name)
        if (row, name) in table.whole:
            if place == 0 or columns[place - 1][0] != name:
                count = sum(other == name for other, _ in columns)
                cells.append(rf"\multicolumn{{{count}}}{{c}}{{{write_cell(table.whole[row, name], style)}}}")
        elif (row, name, label) in table.cells:
            bold = (row, name, label) in table.best
            cells.append(write_cell(table.cells[row, name, label], style, bold=bold))
        else:
            cells.append("--")
    return cells


def write_paper(folder: Path, tables: Sequence[PaperTable]) -> list[Path]:
    """Write tables as paper.tex into a folder and return the path; nothing without tables."""
    if not tables:
        return []
    path = folder / "paper.tex"
    write_whole(path, join_latex([format_paper_table(table) for table in tables]))
    return [path]
