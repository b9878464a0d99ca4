"""Values of several published tables beside those of a sweep's runs by metric, and why some cannot be compared."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from kvbench.report.conditions import is_full
from kvbench.report.memory import name_time
from kvbench.report.papers.comparison import format_cost, list_variants
from kvbench.report.papers.published import COSTS, OF_PROCESS, PublishedTable, find, model_of, prompts_of
from kvbench.report.papers.speed import MEASURES
from kvbench.report.runs_table import find_metric, list_metrics, order_runs
from kvbench.report.tables import Row, format_cell, publish
from kvbench.report.timings import Timing
from kvbench.runs.record.results import Results

OF_SETS = re.compile(r"(s?fid|kid|cmmd|fd_|mind)|(is|precision|recall)\b")
"""Names of set-level metrics, whose values depend on the number of samples."""
Printed = Mapping[str, Mapping[str, Sequence[str]]]
"""Names of the tables that print a value, by metric and value."""


def show_by_metric(
    console: Console, names: Sequence[str], runs: Sequence[Results], timings: Sequence[Timing], folder: Path
) -> None:
    """Print published values beside those of runs of one model, and write them into report-published-<model>.md.

    `names` are the published tables; `timings` come from `task=profile`, which has the phases of a generation.
    """
    if not runs:
        console.print(f"published=[{', '.join(names)}]: no finished run", highlight=False)
        return
    tables = [find(name) for name in names]
    ordered = sorted(order_runs(runs), key=lambda run: not is_full(run))
    printed = [collect_printed(tables, run) for run in ordered]
    full = next((_find_timing(run, timings) for run in ordered if is_full(run)), None)
    rows = [
        row
        for run, cells in zip(ordered, printed, strict=True)
        for row in make_rows(run, cells, _find_timing(run, timings), full)
    ]
    first = ordered[0]
    title = (
        f"published / yours: {first.model_label}, n = {first.n} of {first.prompts_label}, batch "
        f"{first.latency.batch}, {first.latency.machine}; brackets: 95 % intervals"
    )
    notes = list(list_notes(tables, ordered, printed))
    publish(console, title, rows, 3, folder / f"report-published-{first.model}.md", "\n".join(notes))


def collect_printed(tables: Sequence[PublishedTable], run: Results) -> Printed:
    """Return the printed values of a run's rows by metric, each with the tables that have it.

    For a model that a table lacks, the columns of the table's first model count.
    """
    printed: dict[str, dict[str, list[str]]] = {}
    for table in tables:
        labels, where = _choose_labels(table, run), [table.rows[index] for index in table.find_rows(run)]
        for label, settings, metric in (
            (a, b, c) for a in labels for b in where for c in table.find_compared(run)
        ):
            if (cell := table.cell(label, settings, metric)) is not None:
                name = prompts_of(label) if table.sources else " ".join((table.name, *label.split(" ")[1:]))
                printed.setdefault(metric, {}).setdefault(cell, []).append(name)
    return printed


def make_rows(run: Results, printed: Printed, timing: Timing | None, full: Timing | None) -> list[Row]:
    """Return a row for each metric, cost and phase of a run, with the printed values beside the measured one."""
    yours = _measure(run, printed, timing, full)
    lead = {"method": run.method, "budget": run.budget_text}
    return [
        lead
        | {
            "what": name,
            "published": ", ".join(f"{cell} ({', '.join(by)})" for cell, by in printed.get(name, {}).items())
            or "-",
            "yours": yours.get(name, "-"),
        }
        for name in dict.fromkeys((*printed, *yours))
        if name in yours or not OF_SETS.match(name)
    ]


def list_notes(
    tables: Sequence[PublishedTable], runs: Sequence[Results], printed: Sequence[Printed]
) -> Iterator[str]:
    """Yield a line for each reason why printed and measured values cannot be compared."""
    cells = {metric: tables_by_cell for run_cells in printed for metric, tables_by_cell in run_cells.items()}
    yield from _describe_sources(
        tables,
        runs[0],
        {name for tables_by_cell in cells.values() for by in tables_by_cell.values() for name in by},
    )
    if costs := [name for name in cells if name in OF_PROCESS]:
        yield f"{', '.join(costs)}: of the papers' cards, batches and programs; compare ratios to `full` alone"
    yield from _describe_missing([name for name in cells if name not in (*COSTS, *OF_PROCESS)], runs)
    if alone := [run.method for run, run_cells in zip(runs, printed, strict=True) if not run_cells]:
        yield f"no paper has a row: {', '.join(dict.fromkeys(alone))}"


def _describe_sources(tables: Sequence[PublishedTable], run: Results, used: Collection[str]) -> Iterator[str]:
    """Yield notes on the models, data and sources of the tables whose values are shown."""
    chosen = [table for table in tables if table.name in {name.split(" ")[0] for name in used}]
    others = {model_of(_choose_labels(table, run)[0]) for table in chosen} - {run.model}
    if run.model_label != run.model:
        yield "weights are random: published scores are left out, since they do not compare"
    if others:
        yield f"published numbers are of {', '.join(sorted(others))}: {run.model} only rehearses the command"
    for table in chosen:
        yield f"{table.name}: {table.source}; {table.data}, yours {run.n} of {run.prompts_label}"
    for label, protocol in ((label, text) for table in tables for label, text in table.sources.items()):
        if label in used:
            yield f"{label}: {protocol}"


def _describe_missing(metrics: Sequence[str], runs: Sequence[Results]) -> Iterator[str]:
    """Yield why published metrics have no measured value of the same name."""
    values = list_metrics(runs, details=True)
    absent = [name for name in metrics if name not in values]
    if sets := [name for name in absent if OF_SETS.match(name)]:
        reason = f"the number of samples moves these metrics of a whole set, and n = {runs[0].n}"
        yield f"left out: {', '.join(sets)}: {reason}"
    for name in (name for name in absent if name not in sets):
        reasons = [metric.reason for run in runs if (metric := find_metric(run, name)) and metric.reason]
        if reasons:
            yield f"{name} skipped: {reasons[0]}"
        if variants := _find_variants(name, runs):
            yield f"{name}: yours is {variants[0]}, by another detector or network"
        elif not reasons:
            yield f"{name}: not measured by this sweep"


def _choose_labels(table: PublishedTable, run: Results) -> list[str]:
    models = [model_of(label) for label in table.models]
    chosen = run.model if run.model in models else models[0]
    return [label for label, model in zip(table.models, models, strict=True) if model == chosen]


def _measure(run: Results, printed: Printed, timing: Timing | None, full: Timing | None) -> dict[str, str]:
    """Return the measured values of a run by name, as strings."""
    cells: dict[str, str] = {}
    for name in list_metrics([run]):
        if (metric := find_metric(run, name)) is not None:
            cells[name] = format_cell(metric, "range")
    for name in printed:
        if name in COSTS:
            cells[name] = format_cost(COSTS[name](run))
        elif name in OF_PROCESS and timing is not None:
            cells[name] = format_cost(MEASURES[name](timing, full))
        elif name not in cells and (variants := _find_variants(name, [run])):
            cells[name] = f"{format_cell(find_metric(run, variants[0]), 'range')}, {variants[0]}"
            cells.pop(variants[0], None)
    peak = run.memory.gpu_peak_bytes
    cells["peak GiB"] = format_cost(peak / 2**30) if peak else "n/a on a CPU"
    cells["cache GiB"] = format_cost(run.memory.peak_bytes / 2**30)
    cells[time := name_time([run])] = format_cost(run.latency.seconds_per_image)
    if timing is not None:
        parts = timing.row["phases"]["seconds"].items()
        cells |= {f"{time}, {name}": format_cost(each / timing.row["batch"]) for name, each in parts}
    return cells


def _find_variants(name: str, runs: Sequence[Results]) -> list[str]:
    """Return the variants of a metric that have a value in a run; `[official]` is stripped."""
    known = list_metrics(runs, details=True)
    return [variant for variant in list_variants(name.removesuffix("[official]"), runs) if variant in known]


def _find_timing(run: Results, timings: Sequence[Timing]) -> Timing | None:
    """Return the first timing of a run's method at its budget; a full cache has one budget."""
    same = (timing for timing in timings if timing.is_ok and timing.method == run.method)
    return next((timing for timing in same if is_full(run) or timing.allowed == run.memory.allowed), None)
