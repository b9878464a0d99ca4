"""Tables in LaTeX (booktabs, graphicx): metrics with half of their 95 % interval, at most a text width wide.

Special characters are escaped, and those that pdflatex lacks are written by a command.
"""

import unicodedata
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Sequence
from itertools import groupby, pairwise
from math import ceil
from operator import itemgetter
from pathlib import Path

from kvbench.core.files import write_whole
from kvbench.eval.protocol.scores import Better, Metric
from kvbench.report.paper_tables import PaperTable
from kvbench.report.tables import (
    HEADER_WIDTH,
    PROMPTS_ONLY,
    Cell,
    Row,
    Style,
    choose_style,
    format_cell,
    mark_interval,
    split_columns,
    split_metric,
    stack_header,
)
from kvbench.runs.record.folder import slug

ARROWS: dict[Better, str] = {"higher": r"$\uparrow$", "lower": r"$\downarrow$"}
MAX_FLOATS = 12
"""Number of tables after which LaTeX must place all of them; it can hold back at most 18."""
MAX_ROWS = 36
"""Maximum number of rows of a table, so that it fits a page with its caption."""
MAX_LINES = 40
"""Maximum number of lines of all tables on a page, with those of their heads."""
MAX_LETTERS = 84
"""Characters of a row above which a table is divided; LaTeX shrinks what is wider than the text."""
SCALE = r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%"
"""Start of a box that is no wider than the text."""
Body = tuple[str, Sequence[str]]
"""Column specification of a table and its lines."""
Column = tuple[str, str]
"""A metric and the label of a column."""
SPECIAL = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "[": "{[}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "<": r"$<$", ">": r"$>$",
    "|": "$|$", "†": r"$^\dagger$", "↑": r"$\uparrow$", "↓": r"$\downarrow$", "→": r"$\rightarrow$", "≤": r"$\leq$",
    "≥": r"$\geq$", "≈": r"$\approx$", "\u2212": r"$-$", "\u00d7": r"$\times$", "∞": r"$\infty$",
}  # fmt: skip
"""LaTeX by character. LaTeX reads a bracket after `\\\\` as the argument of that line break."""
KNOWN = frozenset("¡¢£¥¦§¨©ª¬®¯°²³µ¶·¹º¼½¾¿Æßæ÷øØıŁłŒœ\u2010\u2011\u2012\u2013—\u2018\u2019“”‡•…‰€™")
"""Characters of article's default encoding besides ASCII and letters with accents."""
ACCENTS = frozenset("\u0300\u0301\u0302\u0303\u0304\u0306\u0307\u0308\u030a\u030b\u030c\u0327")
"""Combining accents of article's default encoding."""
LATIN_END = "\u0180"
"""First character after the accented letters that LaTeX declares."""
LETTER = r"\unicodeletter"
"""Command for any other character; its arguments are code point and character."""
DEFINITION = (
    f"% {LETTER}{{code}}{{letter}} prints the code with pdflatex. For the letter, compile with lualatex or xelatex\n"
    "% and a font that has it, such as \\usepackage{fontspec} \\setmainfont{Noto Serif CJK SC}\n"
    f"\\providecommand{{{LETTER}}}[2]{{\\ifdefined\\Umathchar#2\\else{{\\tiny #1}}\\fi}}\n"
)
"""Definition of `LETTER`; only pdfTeX lacks `Umathchar`."""


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
        {name: write_cell(cell, styles[name], bold=(index, name) in best) for name, cell in row.items()}
        for index, row in enumerate(rows)
    ]
    letters = {
        name: max(len(format_cell(row[name], style)) for row in rows) for name, style in styles.items()
    }
    heads = {name: _write_head(name, rows, letters[name]) for name in styles}
    widths = {name: max(letters[name], *map(len, head.split(r"\\"))) for name, head in heads.items()}
    kinds = {name: "r" if any(isinstance(row[name], Metric) for row in rows) else "l" for name in heads}
    ruled = [index for index, pair in enumerate(pairwise(groups), 1) if pair[0] != pair[1]]
    bodies: list[Body] = []
    for names in split_columns(widths, min(lead, len(heads) - 1), MAX_LETTERS):
        head = [
            rf"\shortstack[{kinds[name]}]{{{heads[name]}}}" if r"\\" in heads[name] else heads[name]
            for name in names
        ]
        lines = [[row_cells[name] for name in names] for row_cells in cells]
        bodies += divide_rows("".join(kinds[name] for name in names), [join_cells(head)], lines, ruled)
    return "\n".join(write_tables(bodies, caption, label))


def join_latex(tables: Sequence[str]) -> str:
    """Return tables as one file, in which LaTeX places all floats after every `MAX_FLOATS` tables."""
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


def join_cells(cells: Sequence[str]) -> str:
    """Return cells as a line of a LaTeX table."""
    return " & ".join(cells) + r" \\"


def divide_rows(
    kinds: str, head: Sequence[str], rows: Sequence[Sequence[str]], ruled: Collection[int]
) -> Iterator[Body]:
    """Yield the parts of a table, of at most `MAX_ROWS` rows and each with the head; a rule stands before `ruled`."""
    parts = max(1, ceil(len(rows) / MAX_ROWS))
    for start, stop in pairwise(round(len(rows) * part / parts) for part in range(parts + 1)):
        body = [*head, r"\midrule"]
        for index in range(start, stop):
            if index > start and index in ruled:
                body.append(r"\midrule")
            body.append(join_cells(rows[index]))
        yield kinds, body


def write_tables(bodies: Sequence[Body], caption: str, label: str) -> Iterator[str]:
    """Yield a table environment for each page of bodies; the first has `label` and `caption`, others refer to it."""
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


def _divide_pages(bodies: Sequence[Body]) -> Iterator[list[str]]:
    """Yield the tabulars of each page."""
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
    """Return a cell; a metric has half of its interval or both ends in small type, degrees of freedom below."""
    if not isinstance(cell, Metric) or cell.value is None:
        return escape(format_cell(cell, "value"))
    value, *ends = (number.replace("-", "$-$") for number in split_metric(cell, style))
    text = rf"\textbf{{{value}}}" if bold else value
    if not ends:
        return text
    shown = rf"$\pm${ends[0]}" if style == "half" else f"[{', '.join(ends)}]"
    return text + rf"\,{{\scriptsize{shown}{mark_interval(cell, escape(PROMPTS_ONLY), '$_{{{}}}$')}}}"


def _write_head(name: str, rows: Sequence[Row], longest: int) -> str:
    """Return the head of a column, in several lines if it is wider than its longest cell."""
    metric = next((row[name] for row in rows if isinstance(row[name], Metric)), None)
    stacked = stack_header(name, longest).split("\n") if len(name) > max(longest, HEADER_WIDTH) else [name]
    lines = [escape(line) for line in stacked]
    if isinstance(metric, Metric):
        lines[-1] += f" {ARROWS[metric.better]}"
    return r"\\".join(lines)


def write_paper(folder: Path, tables: Sequence[PaperTable]) -> list[Path]:
    """Write tables as paper.tex into a folder; return its path in a list, which is empty without tables."""
    if not tables:
        return []
    path = folder / "paper.tex"
    write_whole(path, join_latex([format_paper_table(table) for table in tables]))
    return [path]


def format_paper_table(table: PaperTable) -> str:
    """Return a table as LaTeX tables; the columns of a metric are divided only if they exceed the text width."""
    bodies: list[Body] = []
    ruled = [len({row for row, _, column in table.cells if column is None})]
    for columns in _split_metrics(table):
        rows = [[escape(row), *_write_cells(table, row, columns)] for row in table.rows]
        bodies += divide_rows("l" + "r" * len(columns), _write_heads(table, columns), rows, ruled)
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
    """Return the width of each column in characters; the last column of a metric makes room for a longer name."""
    widths = {("", ""): max(map(len, (*table.rows, table.head)))}
    for name, label in columns:
        cells = [table.cells.get((row, name, label)) for row in table.rows]
        widths[name, label] = max(len(label), *(len(format_cell(cell, table.styles[name])) for cell in cells))
    for name, block in groupby(columns, itemgetter(0)):
        members = list(block)
        room = sum(widths[column] + 2 for column in members) - 2
        widths[members[-1]] += max(0, len(name) + len(table.metrics[name].unit) + 5 - room)
    return widths


def _write_heads(table: PaperTable, columns: Sequence[Column]) -> list[str]:
    """Return the lines of the head: metrics over their columns, rules, and labels."""
    above, rules, end = [""], [], 1
    for name, count in Counter(name for name, _ in columns).items():
        unit, arrow = escape(table.metrics[name].unit), ARROWS[table.metrics[name].better]
        above.append(rf"\multicolumn{{{count}}}{{c}}{{{escape(name)}{f' ({unit})' * bool(unit)} {arrow}}}")
        rules.append(rf"\cmidrule(lr){{{end + 1}-{end + count}}}")
        end += count
    labels = [table.head, *(escape(label) for _, label in columns)]
    return [join_cells(above), " ".join(rules), join_cells(labels)]


def _write_cells(table: PaperTable, row: str, columns: Sequence[Column]) -> Iterator[str]:
    """Yield the cells of a row; the value of an uncompressed run spans the columns of its metric."""
    for name, block in groupby(columns, itemgetter(0)):
        members = list(block)
        if (whole := table.cells.get((row, name, None))) is not None:
            yield rf"\multicolumn{{{len(members)}}}{{c}}{{{write_cell(whole, table.styles[name])}}}"
            continue
        for _, label in members:
            key = row, name, label
            cell = table.cells.get(key)
            yield "--" if cell is None else write_cell(cell, table.styles[name], bold=key in table.best)


def escape(text: str) -> str:
    """Return text for one line of LaTeX: special characters escaped, control characters and line ends as spaces."""
    return "".join(map(_write_letter, text))


def _write_letter(letter: str) -> str:
    if letter in SPECIAL:
        return SPECIAL[letter]
    if letter.isspace() or unicodedata.category(letter) == "Cc":
        return " "
    if letter.isascii() or letter in KNOWN or _has_accent(letter):
        return letter
    return f"{LETTER}{{{ord(letter):04X}}}{{{letter}}}"


def _has_accent(letter: str) -> bool:
    """Return whether LaTeX composes a letter from an ASCII letter and an accent."""
    parts = unicodedata.normalize("NFD", letter)
    return letter < LATIN_END and len(parts) == 2 and parts[0].isascii() and parts[1] in ACCENTS
