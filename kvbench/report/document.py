"""The report of finished runs: tables as Markdown, LaTeX and CSV, with what is best in bold, ablations and figures."""

from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import NamedTuple

from kvbench.core.files import write_whole
from kvbench.report.ablations import find_ablations, find_best, is_full, make_ablation_rows, name_ablation
from kvbench.report.latex import format_latex
from kvbench.report.memory import AT_ONCE
from kvbench.report.runs_table import make_rows, order_runs
from kvbench.report.tables import Row, drop_columns, format_csv, format_markdown
from kvbench.runs.record.folder import slug
from kvbench.runs.record.results import Results

BOLD = "Bold: the best value of a metric among methods that compress at the same budget, whatever the intervals say"
MIN_SHARE = "least / B"
COSTS = ("peak tokens", "last / B", MIN_SHARE, AT_ONCE, "GPU MiB", "state MiB", "n")
"""Columns that LaTeX leaves out for want of room."""


class Section(NamedTuple):
    """A table of the report.

    Attributes:
        title: one line.
        caption: what the table's numbers are.
        rows: at least one.
        groups: rows that compete for the best value, and stand together; None for one that does not.
    """

    title: str
    caption: str
    rows: Sequence[Row]
    groups: Sequence[Hashable]


def write_report(
    runs_dir: Path, runs: Sequence[Results], published: Section | None = None, figures: Sequence[Path] = ()
) -> Path:
    """Write report.md, report.tex and report.csv (parts and variants of metrics included); return the first.

    Args:
        runs_dir: where they go.
        runs: finished ones, at least one.
        published: a paper's table beside what was measured.
        figures: PNG files in `runs_dir`, each with an SVG beside it.
    """
    sections = [*list_sections(runs), *([] if published is None else [published])]
    write_whole(runs_dir / "report.csv", format_csv(make_rows(runs, details=True)))
    write_whole(runs_dir / "report.md", _write_markdown(sections, figures))
    write_whole(runs_dir / "report.tex", write_latex(sections))
    return runs_dir / "report.md"


def list_sections(runs: Sequence[Results]) -> list[Section]:
    """Return the table of all runs, one for each model, and the ablations that are among them."""
    found = []
    for model in sorted({run.model_label for run in runs}):
        own = order_runs([run for run in runs if run.model_label == model])
        rows = drop_columns(make_rows(own), ["model"])
        prompts = ", ".join(sorted({f"{run.prompts_label} (n = {run.n})" for run in own}))
        caption = f"{model}, {prompts}. 95 % intervals. {BOLD}.{describe_unused(own)}"
        found.append(Section(model, caption, rows, [*map(find_group, own)]))
    for ablation in find_ablations(runs):
        rows, title = make_ablation_rows(ablation), name_ablation(ablation)
        found.append(Section(title, f"{title}. 95 % intervals. Bold: the best value.", rows, [0] * len(rows)))
    return found


def _write_markdown(sections: Sequence[Section], figures: Sequence[Path]) -> str:
    parts = ["# Finished runs\n"]
    for title, caption, rows, groups in sections:
        parts.append(f"\n## {title}\n\n{format_markdown(rows, find_best(rows, groups))}\n{caption}\n")
    if figures:
        parts.append("\n## Figures\n")
        parts += [f"\n![{path.stem}]({path.with_suffix('.svg').name})\n" for path in figures]
    return "".join(parts)


def _list_dropped(rows: Sequence[Row]) -> list[str]:
    """Return the columns that LaTeX leaves out; that of the least share stays where one is marked."""
    marked = any(str(row.get(MIN_SHARE, "")).endswith("!") for row in rows)
    return [name for name in COSTS if not (marked and name == MIN_SHARE)]


def is_roomy(run: Results) -> bool:
    """Return whether a run left more than 3 % of its budget unused; False if unknown."""
    return not run.memory.well_used


def describe_unused(runs: Sequence[Results]) -> str:
    """Return a sentence that says what the mark of `is_roomy` means, with a space in front; nothing if none has it."""
    return " !: less than 97 % of the budget in use after some segment." if any(map(is_roomy, runs)) else ""


def find_group(run: Results) -> Hashable:
    """Return what runs have in common that compete for the best value: prompts, budget and number of samples.

    None of one that compresses nothing.
    """
    return None if is_full(run) else (run.prompts_label, run.memory.allowed, run.n)


def write_latex(sections: Sequence[Section]) -> str:
    """Write sections as tables one after the other."""
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
