"""Report of finished runs: tables in Markdown, LaTeX and CSV with the best values in bold, ablations and figures."""

import re
from collections.abc import Collection, Hashable, Sequence
from pathlib import Path
from typing import NamedTuple

from kvbench.core.files import read_text, write_whole
from kvbench.eval.text.drift import TAIL
from kvbench.report.ablations import find_ablations, make_ablation_rows, name_ablation
from kvbench.report.code_notes import list_made, list_marks
from kvbench.report.conditions import find_group
from kvbench.report.drifts import make_tail_rows, read_drifts
from kvbench.report.latex import format_latex, join_latex
from kvbench.report.memory import IN_FLIGHT_COLUMN, READ_COLUMN
from kvbench.report.runs_table import identifying_columns, make_csv_rows, make_rows, order_runs
from kvbench.report.seeds import name_count
from kvbench.report.tables import (
    Row,
    drop_columns,
    escape_markdown,
    find_best,
    format_csv,
    format_markdown,
    list_shown,
)
from kvbench.runs.record.folder import slug
from kvbench.runs.record.results import Results

BOLD_NOTE = (
    "Bold: the best value of a metric among methods that compress at the same budget, regardless of intervals"
)
HALF_NOTE = "± half of the 95 % interval, or its ends"
MIN_SHARE_COLUMN = "least / B"
OMITTED_COLUMNS = (
    "peak tokens", "last / B", MIN_SHARE_COLUMN, IN_FLIGHT_COLUMN, "GPU MiB", READ_COLUMN, "state MiB", "n",
)  # fmt: skip
"""Columns that LaTeX tables may omit to fit a page."""


class Section(NamedTuple):
    """A table of the report.

    Attributes:
        title: one line.
        caption: description of the values.
        rows: rows of the table, at least one.
        groups: group of each row; rows of a group compete for the best value. None for a row that does not compete.
        lead: number of leading columns, which identify a row.
        made: sentences on the code and machines of the runs, not part of the caption.
    """

    title: str
    caption: str
    rows: Sequence[Row]
    groups: Sequence[Hashable]
    lead: int = 1
    made: Sequence[str] = ()


def write_report(
    runs_dir: Path, runs: Sequence[Results], others: Sequence[Section] = (), figures: Sequence[Path] = ()
) -> Path:
    """Write report.md, report.tex and report.csv (with parts and variants of metrics); return the path of report.md.

    `others` are further tables. `figures` are PNG files in `runs_dir`, each also written as SVG. Other figures of the
    report that this one replaces are removed.
    """
    _remove_figures(runs_dir, {path.stem for path in figures})
    sections = [*list_sections(runs), *others]
    write_whole(runs_dir / "report.csv", format_csv(make_csv_rows(runs)))
    write_whole(runs_dir / "report.md", _write_markdown(sections, figures))
    write_whole(runs_dir / "report.tex", write_latex(sections))
    return runs_dir / "report.md"


def _remove_figures(runs_dir: Path, kept: Collection[str]) -> None:
    """Remove the figures that the report in a folder shows, except those with the names `kept`."""
    path = runs_dir / "report.md"
    text = read_text(path, "replace") if path.is_file() else ""
    for name in re.findall(r"^!\[([^/\\\]]+)\]\(\1\.svg\)$", text, re.MULTILINE):
        for end in ("png", "svg", "pdf") if name not in kept else ():
            (runs_dir / f"{name}.{end}").unlink(missing_ok=True)


def list_sections(runs: Sequence[Results]) -> list[Section]:
    """Return a table for each model and for each ablation among the runs."""
    sections = []
    for model in sorted({run.model_label for run in runs}):
        model_runs = order_runs([run for run in runs if run.model_label == model])
        rows = drop_columns(make_rows(model_runs), ["model"])
        prompts = ", ".join(sorted({f"{run.prompts_label} (n = {name_count(run)})" for run in model_runs}))
        caption = f"{model}, {prompts}. 95 % intervals. {BOLD_NOTE}.{describe_rows(model_runs, rows)}"
        lead = len(identifying_columns(model_runs)[0]) - 1  # the model's column was dropped
        sections.append(
            Section(model, caption, rows, [*map(find_group, model_runs)], lead, list_made(model_runs))
        )
    for ablation in find_ablations(runs):
        rows, title = make_ablation_rows(ablation), name_ablation(ablation)
        bold = "Bold: the best value, regardless of intervals"
        caption = f"{title}. 95 % intervals. {bold}.{describe_rows(ablation.runs, rows)}"
        sections.append(Section(title, caption, rows, [0] * len(rows), made=list_made(ablation.runs)))
    return sections


def make_tail(runs_dir: Path, runs: Sequence[Results]) -> Section | None:
    """Return the table of KL's upper quantiles of forced-decoding runs; None without such runs."""
    pairs = read_drifts(runs_dir, runs)
    if not pairs:
        return None
    title = "KL over positions"
    caption = f"{title}: quantiles of KL(full || method) over all scored tokens, in nats."
    rows = make_tail_rows(pairs)
    return Section(title, caption, rows, [None] * len(rows), len(rows[0]) - len(TAIL))


def _write_markdown(sections: Sequence[Section], figures: Sequence[Path]) -> str:
    parts = ["# Finished runs\n"]
    for title, caption, rows, groups, _, made in sections:
        table = format_markdown(rows, find_best(rows, groups))
        parts.append(
            f"\n## {escape_markdown(title)}\n\n{table}\n{escape_markdown(' '.join([caption, *made]))}\n"
        )
    if figures:
        parts.append("\n## Figures\n")
        parts += [f"\n![{path.stem}]({path.with_suffix('.svg').name})\n" for path in figures]
    return "".join(parts)


def _list_dropped(rows: Sequence[Row]) -> list[str]:
    """Return the columns that LaTeX omits; a marked minimum share of the budget, and `n` where it differs, are kept."""
    marked = any(str(row.get(MIN_SHARE_COLUMN, "")).endswith("!") for row in rows)
    kept = {MIN_SHARE_COLUMN: marked, "n": len({row.get("n") for row in rows}) > 1}
    return [name for name in OMITTED_COLUMNS if not kept.get(name)]


def describe_rows(runs: Sequence[Results], rows: Sequence[Row]) -> str:
    """Return sentences, each after a space, on marks and means over seeds; empty if there are none."""
    return "".join(f" {note}" for note in list_marks(runs, list_shown(rows)))


def write_latex(sections: Sequence[Section]) -> str:
    """Return sections as LaTeX tables, each at most a page."""
    tables = [
        format_latex(
            drop_columns(section.rows, _list_dropped(section.rows)),
            section.caption.replace("95 % intervals", HALF_NOTE).replace("; df:", "; subscripts:"),
            slug(section.title),
            find_best(section.rows, section.groups),
            section.groups,
            section.lead,
        )
        for section in sections
    ]
    return join_latex(tables)
