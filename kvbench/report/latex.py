"""Tables in LaTeX (booktabs): metrics with half of their 95 % interval, best values in bold."""

from collections.abc import Collection, Hashable, Sequence

from kvbench.eval.protocol.scores import Better, Metric
from kvbench.report.tables import Cell, Row, format_cell

SPECIAL = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "<": r"$<$", ">": r"$>$",
}  # fmt: skip
ARROWS: dict[Better, str] = {"higher": r"$\uparrow$", "lower": r"$\downarrow$"}


def escape(text: str) -> str:
    """Return text with LaTeX's special characters escaped."""
    return "".join(SPECIAL.get(letter, letter) for letter in text)


def format_latex(
    rows: Sequence[Row],
    caption: str,
    label: str,
    best: Collection[tuple[int, str]] = (),
    groups: Sequence[Hashable] = (),
) -> str:
    """Return rows, at least one, as a LaTeX table.

    The cells (row, column) in `best` are bold, and a rule separates the `groups` of rows.
    """
    columns = list(rows[0])
    metrics = {name for name in columns if any(isinstance(row[name], Metric) for row in rows)}
    lines = []
    for place, row in enumerate(rows):
        if place and groups and groups[place] != groups[place - 1]:
            lines.append(r"\midrule")
        cells = [_write_cell(row[name], bold=(place, name) in best) for name in columns]
        lines.append(" & ".join(cells) + r" \\")
    kinds = "".join("r" if name in metrics else "l" for name in columns)
    head = " & ".join(_write_head(name, rows) for name in columns) + r" \\"
    return "\n".join(
        [
            r"\begin{table}", r"\centering", rf"\begin{{tabular}}{{{kinds}}}", r"\toprule", head, r"\midrule", *lines,
            r"\bottomrule", r"\end{tabular}", rf"\caption{{{escape(caption)}}}", rf"\label{{tab:{label}}}",
            r"\end{table}", "",
        ]
    )  # fmt: skip


def _write_head(name: str, rows: Sequence[Row]) -> str:
    metric = next((row[name] for row in rows if isinstance(row[name], Metric)), None)
    return escape(name) + (f" {ARROWS[metric.better]}" if isinstance(metric, Metric) else "")


def _write_cell(cell: Cell, *, bold: bool) -> str:
    value, mark, half = format_cell(cell, "half").partition(" ±")
    text = rf"\textbf{{{escape(value)}}}" if bold else escape(value)
    return text + (rf"\,{{\scriptsize$\pm${half}}}" if mark else "")
