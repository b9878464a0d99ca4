"""Report of finished runs: tables in Markdown, LaTeX and CSV with the best values in bold, ablations and figures."""

from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import NamedTuple

from kvbench.core.files import write_whole
from kvbench.report.ablations import find_ablations, find_best, is_full, make_ablation_rows, name_ablation
from kvbench.report.latex import format_latex
from kvbench.report.memory import IN_FLIGHT_COLUMN
from kvbench.report.runs_table import make_rows, order_runs
from kvbench.report.tables import Row, drop_columns, format_csv, format_markdown
from kvbench.runs.record.folder import slug
from kvbench.runs.record.results import Results

BOLD_NOTE = (
    "Bold: the best value of a metric among methods that compress at the same budget, regardless of intervals"
)
MIN_SHARE_COLUMN = "least / B"
OMITTED_COLUMNS = ("peak tokens", "last / B", MIN_SHARE_COLUMN, IN_FLIGHT_COLUMN, "GPU MiB", "state MiB", "n")
"""Columns that the LaTeX tables leave out, to fit a page."""


class Section(NamedTuple):
    """A table of the report.

    Attributes:
        title: one line.
        caption: description of the numbers.
        rows: at least one.
        groups: group of each row; rows of a group compete for the best value. None for a row that does not compete.
    """

    title: str
    caption: str
    rows: Sequence[Row]
    groups: Sequence[Hashable]


def write_report(
    runs_dir: Path, runs: Sequence[Results], published: Section | None = None, figures: Sequence[Path] = ()
) -> Path:
    """Write report.md, report.tex and report.csv (with parts and variants of metrics); return the path of report.md.

    `figures` are PNG files in `runs_dir`, each also written as SVG.
    """
    sections = [*list_sections(runs), *([] if published is None else [published])]
    write_whole(runs_dir / "report.csv", format_csv(make_rows(runs, details=True)))
    write_whole(runs_dir / "report.md", _write_markdown(sections, figures))
    write_whole(runs_dir / "report.tex", write_latex(sections))
    return runs_dir / "report.md"


def list_sections(runs: Sequence[Results]) -> list[Section]:
    """Return a table for each model and for each ablation among the runs."""
    sections = []
    for model in sorted({run.model_label for run in runs}):
        own = order_runs([run for run in runs if run.model_label == model])
        rows = drop_columns(make_rows(own), ["model"])
        prompts = ", ".join(sorted({f"{run.prompts_label} (n = {run.n})" for run in own}))
        caption = f"{model}, {prompts}. 95 % intervals. {BOLD_NOTE}.{describe_unused(own)}"
        sections.append(Section(model, caption, rows, [*map(find_group, own)]))
    for ablation in find_ablations(runs):
        rows, title = make_ablation_rows(ablation), name_ablation(ablation)
        caption = f"{title}. 95 % intervals. Bold: the best value."
        sections.append(Section(title, caption, rows, [0] * len(rows)))
    return sections


def _write_markdown(sections: Sequence[Section], figures: Sequence[Path]) -> str:
    parts = ["# Finished runs\n"]
    for title, caption, rows, groups in sections:
        parts.append(f"\n## {title}\n\n{format_markdown(rows, find_best(rows, groups))}\n{caption}\n")
    if figures:
        parts.append("\n## Figures\n")
        parts += [f"\n![{path.stem}]({path.with_suffix('.svg').name})\n" for path in figures]
    return "".join(parts)


def _list_dropped(rows: Sequence[Row]) -> list[str]:
    """Return the columns that LaTeX leaves out; the smallest share of the budget stays if one is marked."""
    marked = any(str(row.get(MIN_SHARE_COLUMN, "")).endswith("!") for row in rows)
    return [name for name in OMITTED_COLUMNS if not (marked and name == MIN_SHARE_COLUMN)]


def describe_unused(runs: Sequence[Results]) -> str:
    """Return a sentence, after a space, on the mark of runs that leave more than 3 % unused; empty without one."""
    unused = any(not run.memory.well_used for run in runs)
    return " !: less than 97 % of the budget in use after some segment." * unused


def find_group(run: Results) -> Hashable:
    """Return the prompts, budget and number of samples of a run, which competing runs share; None for a full cache."""
    return None if is_full(run) else (run.prompts_label, run.memory.allowed, run.n)


def write_latex(sections: Sequence[Section]) -> str:
    """Return sections as LaTeX tables."""
    tables = [
        format_latex(
            drop_columns(section.rows, _list_dropped(section.rows)),
            section.caption.replace("95 % intervals", "± half of the 95 % interval"),
            slug(section.title),
            find_best(section.rows, section.groups),
            section.groups,
        )
        for section in sections
    ]
    return "% needs \\usepackage{booktabs}\n\n" + "\n".join(tables)
