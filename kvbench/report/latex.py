"""Tables in LaTeX (booktabs, graphicx): metrics with half of their 95 % interval, at most a text width wide."""

from collections.abc import Collection, Hashable, Iterator, Sequence
from itertools import pairwise
from math import ceil

from kvbench.eval.protocol.scores import Better, Metric
from kvbench.report.latex_letters import DEFINITION, LETTER, escape
from kvbench.report.seeds import MeanMetric
from kvbench.report.tables import (
    HEADER_WIDTH,
    Cell,
    Row,
    Style,
    choose_style,
    format_cell,
    format_df,
    format_number,
    split_columns,
    stack_header,
)

ARROWS: dict[Better, str] = {"higher": r"$\uparrow$", "lower": r"$\downarrow$"}
MAX_FLOATS = 12
"""Number of tables after which LaTeX places all of them; it holds back at most 18 without an error."""
MAX_ROWS = 36
"""Largest number of rows of a table, so that it fits a page with its caption."""
MAX_LINES = 40
"""Largest number of lines of all tables on a page, those of their heads among them."""
MAX_LETTERS = 84
"""Letters of a row, from which a table is divided; LaTeX shrinks what is wider than its text."""
SCALE = r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%"
"""Start of a box that is no wider than the text."""


def format_latex(
    rows: Sequence[Row],
    caption: str,
    label: str,
    best: Collection[tuple[int, str]] = (),
    groups: Sequence[Hashable] = (),
    lead: int = 1,
) -> str:
    """Return rows, at least one, as LaTeX tables.

    The cells (row, column) in `best` are bold, and a rule separates the `groups` of rows. A table that is wider than a
    page is divided into several, each with the first `lead` columns; a table of many rows is divided as well.
    """
    styles = {name: choose_style(row[name] for row in rows) for name in rows[0]}
    cells = [
        {name: write_cell(cell, styles[name], bold=(place, name) in best) for name, cell in row.items()}
        for place, row in enumerate(rows)
    ]
    letters = {
        name: max(len(format_cell(row[name], style)) for row in rows) for name, style in styles.items()
    }
    heads = {name: _write_head(name, rows, letters[name]) for name in styles}
    widths = {name: max(letters[name], *map(len, head.split(r"\\"))) for name, head in heads.items()}
    kinds = {name: "r" if any(isinstance(row[name], Metric) for row in rows) else "l" for name in heads}
    bodies = []
    for names in split_columns(widths, min(lead, len(heads) - 1), MAX_LETTERS):
        head = " & ".join(_wrap_head(heads[name], kinds[name]) for name in names) + r" \\"
        for start, stop in divide_rows(len(rows)):
            body = [head, r"\midrule"]
            for place in range(start, stop):
                if place > start and groups and groups[place] != groups[place - 1]:
                    body.append(r"\midrule")
                body.append(" & ".join(cells[place][name] for name in names) + r" \\")
            bodies.append(("".join(kinds[name] for name in names), body))
    return "\n".join(write_tables(bodies, caption, label))


def join_latex(tables: Sequence[str]) -> str:
    """Return tables as one file, whose floats LaTeX places now and then: it can hold back only so many."""
    parts, held = ["% needs \\usepackage{booktabs,graphicx}\n"], 0
    if any(LETTER in table for table in tables):
        parts.append(DEFINITION)
    for table in tables:
        parts.append(table)
        held += table.count(r"\begin{table}")
        if held >= MAX_FLOATS:
            parts.append("\\clearpage\n")
            held = 0
    return "\n".join(parts)


def divide_rows(count: int) -> list[tuple[int, int]]:
    """Return the first row of each part and the one after its last, in parts of at most `MAX_ROWS` rows."""
    parts = max(1, ceil(count / MAX_ROWS))
    return list(pairwise(round(count * part / parts) for part in range(parts + 1)))


def write_tables(bodies: Sequence[tuple[str, Sequence[str]]], caption: str, label: str) -> Iterator[str]:
    """Yield a table environment for the bodies that fit a page; further ones refer to the first.

    Args:
        bodies: kinds of columns and lines of each table.
        caption: text of the first table's caption, not escaped.
        label: label of the first table.
    """
    pages = list(_divide_pages(bodies))
    for part, page in enumerate(pages, 1):
        title, name = escape(caption).replace(" x ", r" $\times$ "), f"tab:{label}"
        if part > 1:
            title = rf"Table~\ref{{{name}}}, continued (part {part} of {len(pages)})."
            name += f"-{part}"
        yield "\n".join(
            [
                r"\begin{table}[htbp]", r"\centering", r"\small", "\n\\par\\medskip\n".join(page),
                rf"\caption{{{title}}}", rf"\label{{{name}}}", r"\end{table}", "",
            ]
        )  # fmt: skip


def _divide_pages(bodies: Sequence[tuple[str, Sequence[str]]]) -> Iterator[list[str]]:
    """Yield the tables of each page, from the kinds of their columns and their lines."""
    page: list[str] = []
    height = 0
    for kinds, lines in bodies:
        if page and height + len(lines) > MAX_LINES:
            yield page
            page, height = [], 0
        head, end = rf"\begin{{tabular}}{{{kinds}}}", r"\end{tabular}}"
        page.append("\n".join([SCALE, head, r"\toprule", *lines, r"\bottomrule", end]))
        height += len(lines)
    yield page


def write_cell(cell: Cell, style: Style, *, bold: bool = False) -> str:
    """Return a cell with half of its interval, or its ends, in small letters, and its degrees of freedom below."""
    if not isinstance(cell, Metric) or cell.value is None:
        return escape(format_cell(cell, "value"))
    value = format_number(cell.value, cell.digits).replace("-", "$-$")
    text = rf"\textbf{{{value}}}" if bold else value
    if cell.interval is None:
        return text
    low, high = cell.interval
    mark = ""
    if isinstance(cell, MeanMetric) and cell.df is not None:
        mark = r"$^\dagger$" if cell.prompts_only else f"$_{{{format_df(cell.df)}}}$"
    if style == "range":
        ends = ", ".join(format_number(end, cell.digits).replace("-", "$-$") for end in (low, high))
        return text + rf"\,{{\scriptsize[{ends}]{mark}}}"
    return text + rf"\,{{\scriptsize$\pm${(high - low) / 2:.{cell.digits}f}{mark}}}"


def _write_head(name: str, rows: Sequence[Row], longest: int) -> str:
    """Return the head of a column, in several lines if it is wider than its longest cell."""
    metric = next((row[name] for row in rows if isinstance(row[name], Metric)), None)
    stacked = stack_header(name, longest).split("\n") if len(name) > max(longest, HEADER_WIDTH) else [name]
    lines = [escape(line) for line in stacked]
    if isinstance(metric, Metric):
        lines[-1] += f" {ARROWS[metric.better]}"
    return r"\\".join(lines)


def _wrap_head(head: str, kind: str) -> str:
    return rf"\shortstack[{kind}]{{{head}}}" if r"\\" in head else head
