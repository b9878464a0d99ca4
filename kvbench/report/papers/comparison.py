"""A sweep's measured values beside published ones: tables, and plots of the paper's figure."""

import re
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path

from rich.console import Console

from kvbench.core.files import write_whole
from kvbench.report.code_notes import list_made
from kvbench.report.conditions import find_conditions, find_group, group_conditions, is_full
from kvbench.report.document import BOLD_NOTE, Section, describe_rows, write_latex
from kvbench.report.figures.draw import NOT_INSTALLED, can_draw, describe_joined, draw_fidelity, save_groups
from kvbench.report.memory import mark_unused
from kvbench.report.papers.printed import PrintedFigure
from kvbench.report.papers.published import (
    COSTS,
    TOLERANCE,
    PublishedTable,
    Settings,
    find_setting,
    model_of,
    prompts_of,
)
from kvbench.report.runs_table import find_metric, order_runs
from kvbench.report.seeds import list_counts, name_count
from kvbench.report.tables import Cell, Row, drop_columns, print_line, print_rows, publish
from kvbench.runs.record.results import Results

BASELINE_METHODS = ("random", "first_scales")
"""Methods that no paper reports and every method should beat."""


def make_rows(table: PublishedTable, runs: Sequence[Results]) -> list[Row]:
    """Return a row for each run that matches a row of a table: settings, then measured and published cells by metric.

    A metric without a value is `skipped` or `failed` if it was requested, `-` if not. A metric measured with another
    detector or network than the paper's has a column under its own name, without a published one.
    """
    labels = find_labels(table, runs)
    return [
        _list_settings(table, run, runs) | _list_cells(table, labels, where, run, runs)
        for where, run in _match(table, runs)
    ]


def make_section(table: PublishedTable, runs: Sequence[Results]) -> Section | None:
    """Return a table as a section of the report, its shared settings in the caption; None if no run matches."""
    matching = [run for _, run in _match(table, runs)]
    if not matching:
        return None
    rows = make_rows(table, matching)
    lead = list(_list_settings(table, matching[0], matching))
    same = [name for name in lead if len(rows) > 1 and len({str(row[name]) for row in rows}) == 1]
    alike = "".join(f", {name} {rows[0][name]}" for name in same)
    caption = (
        f"{make_title(table, matching)}{alike}. 95 % intervals. {BOLD_NOTE}.{describe_rows(matching, rows)}"
    )
    title = f"{table.name}: {table.title}"
    groups, leading = list(map(find_group, matching)), max(1, len(lead) - len(same))
    return Section(title, caption, drop_columns(rows, same), groups, leading, list_made(matching))


def _match(table: PublishedTable, runs: Sequence[Results]) -> list[tuple[Settings, Results]]:
    """Return the runs that match rows of a table in the table's order, each with the settings of its row.

    Other runs of `BASELINE_METHODS` come before the first run with which they can be compared.
    """
    matched = table.match(runs)
    matching = [run for _, run in matched]
    compressed = [run for run in matching if not is_full(run)] or matching
    for run in order_runs([run for run in runs if run.method in BASELINE_METHODS and run not in matching]):
        near = next((other for other in compressed if _is_near(run, other)), None)
        if near is not None:
            matched.insert(next(i for i, (_, other) in enumerate(matched) if other is near), ({}, run))
    return matched


def _is_near(reference: Results, run: Results) -> bool:
    """Return whether two runs share conditions and noise; the second has a similar budget or compresses nothing."""
    alike = (find_conditions(reference), reference.noise) == (find_conditions(run), run.noise)
    shares = (run.memory.budget, run.memory.peak)
    close = any(abs(reference.memory.budget - share) <= TOLERANCE * share for share in shares)
    return alike and (close or is_full(run))


def make_title(table: PublishedTable, runs: Sequence[Results]) -> str:
    """Return a title that names the models and data of published and measured values."""
    models = sorted({run.model_label for run in runs})
    published = " / ".join(find_labels(table, runs))
    measured = [*models, *sorted({run.prompts_label for run in runs}), f"n = {', '.join(list_counts(runs))}"]
    if set(table.metrics) & set(COSTS):
        measured.append("batch " + ", ".join(map(str, sorted({run.latency.batch for run in runs}))))
    return f"{table.source}: {table.title}. Published: {published}, {table.data}; measured: {', '.join(measured)}"


def show_comparison(
    console: Console, table: PublishedTable, runs: Sequence[Results], runs_dir: Path
) -> Section | None:
    """Print measured and published values, write them into report-<table>.md and .tex, and draw the figure.

    Returns:
        The table as a section of the report; None if no run matches.
    """
    section = make_section(table, runs)
    if section is None:
        console.print(
            f"{table.name}: no finished run matches a row; scores need trained weights", highlight=False
        )
        return None
    matching = [run for _, run in _match(table, runs)]
    rows, lead = make_rows(table, matching), len(_list_settings(table, matching[0], matching))
    title = f"{make_title(table, matching)} (with 95 % intervals).{describe_rows(matching, rows)}"
    title = " ".join([title, *list_made(matching)])
    publish(console, title, rows, lead, runs_dir / f"report-{table.name}.md")
    write_whole(runs_dir / f"report-{table.name}.tex", write_latex([section]))
    if table.figure is not None and not can_draw():
        print_line(console, NOT_INSTALLED, "")
    elif table.figure == "fidelity":
        for path in draw_fidelity(runs_dir, runs, table.name):
            console.print(f"drawn: {path}", highlight=False, soft_wrap=True)
    elif table.figure is not None:
        draw_steps(console, table, matching, runs_dir)
    return section


def draw_steps(console: Console, table: PublishedTable, runs: Sequence[Results], runs_dir: Path) -> None:
    """Plot the recorded steps of runs into <table>.png, a figure for each group that shares conditions."""
    from kvbench.report.figures import lines  # takes long to import

    with_steps = [run for run in runs if run.steps]
    if not with_steps or table.figure is None:
        console.print(f"{table.name}: no run recorded its steps; set method.watch_lse=true", highlight=False)
        return
    figures = {}
    for where, members in group_conditions(with_steps).items():
        figures[where] = [lines.draw_steps(members, table.figure, where + describe_joined(members))]
    for path in save_groups(runs_dir, table.name, figures):
        console.print(f"drawn: {path}", highlight=False, soft_wrap=True)


def show_printed(
    console: Console, name: str, sources: Sequence[PublishedTable], figures: Sequence[PrintedFigure]
) -> None:
    """Print published values of memory or operations beside those computed from shapes."""
    cited = "; ".join(dict.fromkeys(table.source for table in sources))
    columns = ("model", "row", "published", "from shapes", "verdict", "how")
    rows: list[Row] = [dict(zip(columns, astuple(figure), strict=True)) for figure in figures]
    print_rows(console, f"{name} ({cited}): costs from shapes", rows, len(rows[0]))


def find_labels(table: PublishedTable, runs: Sequence[Results]) -> tuple[str, ...]:
    """Return the published columns to compare with runs, see `PublishedTable.labels`."""
    return table.labels(sorted({r.model_label for r in runs}), sorted({r.prompts_label for r in runs}))


def _list_settings(table: PublishedTable, run: Results, runs: Sequence[Results]) -> dict[str, Cell]:
    row: dict[str, Cell] = {"model": run.model_label} if len({r.model_label for r in runs}) > 1 else {}
    row |= {"prompts": run.prompts_label} if len({r.prompts_label for r in runs}) > 1 else {}
    row |= {"n": name_count(run)} if len(list_counts(runs)) > 1 else {}
    row |= {"method": run.method, "budget": run.budget_text + mark_unused(run.memory)}
    for key in (*table.fixed, *table.keys):
        if key not in row:
            value = find_setting(run, key)
            row[key.removeprefix("latency.").removeprefix("method.")] = "-" if value is None else str(value)
    return row


def _list_cells(
    table: PublishedTable, labels: Sequence[str], where: Settings, run: Results, runs: Sequence[Results]
) -> dict[str, Cell]:
    cells: dict[str, Cell] = {}
    names = " / ".join(labels) if len(labels) < 3 and not table.sources else "published"
    for metric in table.metrics:
        if metric in COSTS:
            cells[metric] = format_cost(COSTS[metric](run))
        elif any(metric in r.metrics for r in runs):
            cells[metric] = find_metric(run, metric)
        cells[f"{metric}, {names}"] = _list_printed(table, labels, where, metric, run)
        cells |= {name: find_metric(run, name) for name in list_variants(metric, runs)}
    also = (name for name in table.also if name not in cells and any(name in r.metrics for r in runs))
    return cells | {name: find_metric(run, name) for name in also}


def _list_printed(
    table: PublishedTable, labels: Sequence[str], where: Settings, metric: str, run: Results
) -> str:
    """Return the published cells of a row; only the run's model counts in a table of several sources."""
    if metric not in table.find_compared(run):
        return "-"
    cells = {label: table.cell(label, where, metric) for label in labels}
    if table.sources:
        printed = {
            label: cell for label, cell in cells.items() if cell and model_of(label) == run.model_label
        }
        return ", ".join(f"{cell} ({prompts_of(label)})" for label, cell in printed.items()) or "-"
    return " / ".join(cell or "-" for cell in cells.values()) if any(cells.values()) else "-"


def format_cost(value: float | None) -> str:
    """Return a value of memory or time with four digits, or all digits before the point; `-` for None."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def list_variants(metric: str, runs: Sequence[Results]) -> list[str]:
    """Return the variants of a metric on other detectors, such as geneval[scenes]/position."""
    names = dict.fromkeys(name for run in runs for name in run.metrics)
    return [name for name in names if name != metric and re.sub(r"\[[^]]*\]", "", name) == metric]
