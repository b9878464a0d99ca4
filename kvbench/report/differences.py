"""Paired differences of methods to one of them at the same budget, and the table over calibrations.

The table over calibrations has means over runs that differ in their calibration's seed, and the spread between them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from kvbench.core.config import ConfigError
from kvbench.eval.protocol.scores import Metric
from kvbench.report.code_notes import list_made, list_marks
from kvbench.report.conditions import find_conditions, is_full
from kvbench.report.runs_table import find_metric, identifying_columns, list_metrics, name_methods, order_runs
from kvbench.report.seeds import (
    MeanMetric,
    compare_seeds,
    count_seeds,
    find_members,
    is_calibrated,
    list_members,
    name_count,
)
from kvbench.report.tables import Cell, Row, drop_columns, list_shown, publish
from kvbench.runs.record.results import Results


def make_difference_rows(runs: Sequence[Results], runs_dir: Path, against: str) -> list[Row]:
    """Return a row for each pair of `find_pairs`: the first run's cells, and its differences to the second one.

    `runs` are finished runs below `runs_dir` as `combine_seeds` returns them; several seeds are compared seed by seed.

    Raises:
        ConfigError: see `find_pairs`.
    """
    pairs = find_pairs(runs, against)
    compared = [(run, compare_seeds(run, partner, runs_dir)) for run, partner in pairs]
    compared = [(run, metrics) for run, metrics in compared if metrics]
    names = list_metrics([run for run, _ in compared])
    shown = [name for name in names if any(name in metrics for _, metrics in compared)]
    columns = identifying_columns([run for run, _ in compared])
    return [
        {**which, "n": _name_count(run, metrics), **{name: metrics.get(name) for name in shown}}
        for which, (run, metrics) in zip(columns, compared, strict=True)
    ]


def find_pairs(runs: Sequence[Results], against: str) -> list[tuple[Results, Results]]:
    """Return each run with its partner of equal model, reference, budget, unit and number of samples.

    A partner has `against` as its method or as the name of its folder. Pairs are sorted by model, budget and method.

    Raises:
        ConfigError: no run has the method or name `against`, or a run has several partners.
    """
    members = find_members(runs)
    partners: dict[object, list[Results]] = {}
    for run in runs:
        for candidate in (run,) if run.method == against else list_members(run):
            if against in (candidate.method, candidate.run):
                partners.setdefault(_find_key(run, members), []).append(candidate)
    if not partners:
        methods = ", ".join(sorted({run.method for run in runs}))
        raise ConfigError(f"against={against}: no finished run has that method or name; there are {methods}")
    pairs = []
    for run in order_runs(runs):
        chosen = partners.get(_find_key(run, members), [])
        if len(chosen) > 1:
            names = name_methods(chosen)
            several = ", ".join(
                f"{candidate.run} ({name})" for candidate, name in zip(chosen, names, strict=True)
            )
            raise ConfigError(
                f"against={against}: matches several runs at one budget; set it to one of {several}"
            )
        if chosen and chosen[0] not in (run, *list_members(run)) and run.reference is not None:
            pairs.append((run, chosen[0]))
    return pairs


def _name_count(run: Results, metrics: Mapping[str, Metric]) -> str:
    """Return the samples of a row of differences, with the number of pairs of runs if there are several."""
    pairs = max(metric.runs if isinstance(metric, MeanMetric) else 1 for metric in metrics.values())
    return f"{run.n} x {pairs}" if pairs > 1 else str(run.n)


def show_differences(
    console: Console, runs: Sequence[Results], runs_dir: Path, against: str, output: Path
) -> None:
    """Print the differences and write them into report-against-<method>.md of the folder `output`."""
    rows = make_difference_rows(runs, runs_dir, against)
    if not rows:
        console.print(f"against={against}: no two finished runs differ only in method", highlight=False)
        return
    models = list(dict.fromkeys(str(row["model"]) for row in rows))
    shown = rows if len(models) > 1 else drop_columns(rows, ["model"])
    what = f"difference to {against} at the same budget, same prompts and noise (with 95 % intervals)"
    path = output / f"report-against-{against}.md"
    title = f"{', '.join(models)}: {what}"
    compared = [run for pair in find_pairs(runs, against) for run in pair]
    note = " ".join([*list_marks(compared, list_shown(rows), peaks=False), *list_made(compared)])
    publish(console, title, shown, list(shown[0]).index("n") + 1, path, note)


def _find_key(run: Results, members: Mapping[str, Results]) -> tuple[object, ...]:
    """Return what compared runs share; references are compared by their rows, as each seed has one."""
    reference = members.get(str(run.reference))
    name = str(run.reference) if reference is None else reference.run
    return run.model, name, *run.memory.allowed, run.n


def choose_calibrated(runs: Sequence[Results]) -> list[Results]:
    """Return the `combine_seeds` runs over several calibrations, and those without a calibration at their budgets."""
    rows = [(run, count_seeds(run)[1] > 1) for run in order_runs(runs) if not is_full(run)]
    budgets = {(find_conditions(run), run.memory.allowed) for run, several in rows if several}
    return [
        run
        for run, several in rows
        if several or (not is_calibrated(run) and (find_conditions(run), run.memory.allowed) in budgets)
    ]


def make_calibration_rows(runs: Sequence[Results], runs_dir: Path, against: str | None = None) -> list[Row]:
    """Return a row per method and budget with the mean and standard deviation of each metric over calibrations.

    `runs` are finished runs below `runs_dir` as `combine_seeds` returns them. The runs of `against`, a method or the
    name of a run, are subtracted sample by sample; None subtracts nothing. There are no rows if no two runs differ in
    calibration, or if `against` has no single row at their budgets.
    """
    chosen = choose_calibrated(runs)
    measured = [(run, {name: find_metric(run, name) for name in run.metrics}) for run in chosen]
    if against is not None and chosen:
        try:
            pairs = {run.run: partner for run, partner in find_pairs(runs, against)}
        except ConfigError:  # `against` matches no run of this sweep, or several
            return []
        measured = [
            (run, {**compare_seeds(run, pairs[run.run], runs_dir)}) for run in chosen if run.run in pairs
        ]
    names = [
        name for name in list_metrics(runs) if any(metrics.get(name) is not None for _, metrics in measured)
    ]
    columns = identifying_columns([run for run, _ in measured])
    rows: list[Row] = []
    for which, (run, metrics) in zip(columns, measured, strict=True):
        _, calibrations = count_seeds(run)
        prompts = str(run.setting("calibrate.count"))
        joined = (str(calibrations), prompts) if calibrations > 1 else ("-", "-")
        counts = {"calibrations": joined[0], "of prompts": joined[1], "n": name_count(run)}
        rows.append({**which, **counts, **_list_cells(names, metrics)})
    return rows


def _list_cells(names: Sequence[str], metrics: Mapping[str, Metric | None]) -> dict[str, Cell]:
    cells: dict[str, Cell] = {}
    for name in names:
        metric = metrics.get(name)
        between = metric.between if isinstance(metric, MeanMetric) else None
        cells[name] = metric
        cells[f"{name} sd"] = "-" if metric is None or between is None else f"{between:.{metric.digits}f}"
    return cells


def show_calibrations(
    console: Console, runs: Sequence[Results], runs_dir: Path, output: Path, against: str | None = None
) -> None:
    """Print the table over calibrations and, with `against`, the table of differences to that method.

    They are written into report-calibrations.md and report-calibrations-against-<method>.md of the folder `output`.
    Nothing is printed if no two runs differ in calibration.
    """
    for base in dict.fromkeys((None, against)):
        if rows := make_calibration_rows(runs, runs_dir, base):
            what = "means" if base is None else f"mean differences to {base}"
            title = (
                f"Over calibrations: {what}, 95 % intervals over prompts and calibrations, sd between runs"
            )
            path = output / f"report-calibrations{'' if base is None else f'-against-{base}'}.md"
            chosen = choose_calibrated(runs)
            note = " ".join([*list_marks(chosen, list_shown(rows), peaks=False), *list_made(chosen)])
            publish(console, title, rows, list(rows[0]).index("n") + 1, path, note)
