"""Tables for a paper in LaTeX: a block of columns for each metric, divided so that each table fits a page."""

from collections.abc import Sequence
from pathlib import Path

from kvbench.core.files import write_whole
from kvbench.report.latex import ARROWS, divide_rows, join_latex, write_cell, write_tables
from kvbench.report.latex_letters import escape
from kvbench.report.latex_width import COLUMN_GAP, Width, choose_size, measure, measure_columns, split_columns
from kvbench.report.paper_tables import PaperTable
from kvbench.runs.record.folder import slug

Column = tuple[str, str]
"""A metric and a label."""


def format_paper_table(table: PaperTable) -> str:
    """Return a table as one or several LaTeX tables, with whole metrics in each where these fit the text width."""
    leads = [escape(row) for row in table.rows]
    bodies = []
    for columns in _split_metrics(table, leads):
        cells = [_write_cells(table, row, columns) for row in table.rows]
        size = choose_size(_measure(table, leads, columns))
        head = _write_heads(table, columns)
        for start, stop in divide_rows(len(leads)):
            body = list(head)
            for place in range(start, stop):
                if place > start and place == len({row for row, _ in table.whole}):
                    body.append(r"\midrule")
                body.append(" & ".join([leads[place], *cells[place]]) + r" \\")
            bodies.append((size, "l" + "r" * len(columns), body))
    return "\n".join(write_tables(bodies, table.caption, slug(table.title)))


def _split_metrics(table: PaperTable, leads: Sequence[str]) -> list[list[Column]]:
    """Return the columns of each table: as many metrics as fit, or a part of one that does not fit."""
    tables: list[list[Column]] = [[]]
    for name in table.metrics:
        columns = [(name, label) for label in table.columns]
        if choose_size(_measure(table, leads, [*tables[-1], *columns])) is not None:
            tables[-1] += columns
            continue
        widths = _measure(table, leads, columns)
        parts = [[columns[place - 1] for place in block[1:]] for block in split_columns(widths, 1)]
        tables += parts
    return [columns for columns in tables if columns]


def _measure(table: PaperTable, leads: Sequence[str], columns: Sequence[Column]) -> list[Width]:
    """Return the widths of the leading column and of others; a metric's name may be wider than its columns."""
    rows = [[escape(label) for _, label in columns]]
    rows += [_write_cells(table, row, columns, joined=False) for row in table.rows]
    widths = [*measure_columns([[lead] for lead in (*leads, table.head)]), *measure_columns(rows)]
    for name in dict.fromkeys(name for name, _ in columns):
        own = [place for place, (other, _) in enumerate(columns, 1) if other == name]
        room = sum(sum(widths[place]) for place in own) + COLUMN_GAP * (len(own) - 1)
        missing = max(0.0, measure(_name_metric(table, name)).text - room)
        widths[own[-1]] = Width(widths[own[-1]].text + missing, widths[own[-1]].script)
    return widths


def _write_heads(table: PaperTable, columns: Sequence[Column]) -> list[str]:
    """Return the lines of the head: metrics over their columns, rules, and labels."""
    names = list(dict.fromkeys(name for name, _ in columns))
    counts = [sum(other == name for other, _ in columns) for name in names]
    above = [
        rf"\multicolumn{{{n}}}{{c}}{{{_name_metric(table, name)}}}"
        for name, n in zip(names, counts, strict=True)
    ]
    ends = [1 + sum(counts[: place + 1]) for place in range(len(counts))]
    rules = [rf"\cmidrule(lr){{{end - n + 1}-{end}}}" for end, n in zip(ends, counts, strict=True)]
    labels = [table.head, *(escape(label) for _, label in columns)]
    return [" & ".join(["", *above]) + r" \\", " ".join(rules), " & ".join(labels) + r" \\", r"\midrule"]


def _name_metric(table: PaperTable, name: str) -> str:
    metric = table.metrics[name]
    unit = f" ({escape(metric.unit)})" if metric.unit else ""
    return f"{escape(name)}{unit} {ARROWS[metric.better]}"


def _write_cells(table: PaperTable, row: str, columns: Sequence[Column], *, joined: bool = True) -> list[str]:
    """Return the cells of a row; the value of an uncompressed run is `joined` over the columns of its metric."""
    cells = []
    for place, (name, label) in enumerate(columns):
        if (row, name) in table.whole and joined:
            if place == 0 or columns[place - 1][0] != name:
                count = sum(other == name for other, _ in columns)
                cells.append(rf"\multicolumn{{{count}}}{{c}}{{{write_cell(table.whole[row, name])}}}")
        elif (row, name, label) in table.cells:
            bold = (row, name, label) in table.best
            cells.append(write_cell(table.cells[row, name, label], bold=bold))
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
