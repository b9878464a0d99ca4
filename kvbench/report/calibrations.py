"""Table over calibrations: means over runs that differ in their calibration's seed, and the spread between them."""

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from kvbench.core.config import ConfigError
from kvbench.eval.protocol.scores import Metric
from kvbench.report.ablations import is_full
from kvbench.report.code_notes import list_notes
from kvbench.report.conditions import find_conditions
from kvbench.report.differences import find_pairs
from kvbench.report.runs_table import find_metric, identifying_columns, list_metrics, order_runs
from kvbench.report.seeds import MeanMetric, compare_seeds, count_seeds, is_calibrated, name_count
from kvbench.report.tables import Cell, Row, list_shown, publish
from kvbench.runs.record.results import Results


def choose_calibrated(runs: Sequence[Results]) -> list[Results]:
    """Return the rows of several calibrations, and of methods without a calibration at their budgets.

    Args:
        runs: finished runs, as `combine_seeds` returns them.
    """
    rows = [run for run in order_runs(runs) if not is_full(run)]
    several = {_find_place(run) for run in rows if count_seeds(run)[1] > 1}
    return [
        run
        for run in rows
        if count_seeds(run)[1] > 1 or (_find_place(run) in several and not is_calibrated(run))
    ]


def _find_place(run: Results) -> Hashable:
    """Return what comparable rows share."""
    return find_conditions(run), run.memory.allowed


def make_calibration_rows(runs: Sequence[Results], runs_dir: Path, against: str | None = None) -> list[Row]:
    """Return a row per method and budget with the mean and standard deviation of each metric over calibrations.

    With `against`, the runs of another method are subtracted sample by sample.

    Args:
        runs: finished runs, as `combine_seeds` returns them.
        runs_dir: folder of the runs.
        against: method or run to subtract.

    Returns:
        No rows if no two runs differ in calibration, or if `against` has no single row at their budgets.
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
    return [
        {**which, **_list_counts(run), **_list_cells(names, metrics)}
        for which, (run, metrics) in zip(columns, measured, strict=True)
    ]


def _list_counts(run: Results) -> dict[str, Cell]:
    _, calibrations = count_seeds(run)
    joined = (str(calibrations), str(run.setting("calibrate.count"))) if calibrations > 1 else ("-", "-")
    return {"calibrations": joined[0], "of prompts": joined[1], "n": name_count(run)}


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
) -> list[Path]:
    """Print the table over calibrations and the table of differences to a method; return their Markdown files.

    Nothing is printed if no two runs differ in calibration.

    The files report-calibrations.md and report-calibrations-against-<method>.md are written to `output`. Without
    `against` there are no differences.
    """
    written = []
    for base in dict.fromkeys((None, against)):
        if rows := make_calibration_rows(runs, runs_dir, base):
            what = "means" if base is None else f"mean differences to {base}"
            title = (
                f"Over calibrations: {what}, 95 % intervals over prompts and calibrations, sd between runs"
            )
            path = output / f"report-calibrations{'' if base is None else f'-against-{base}'}.md"
            note = " ".join(list_notes(choose_calibrated(runs), list_shown(rows), peaks=False))
            publish(console, title, rows, list(rows[0]).index("n") + 1, path, note)
            written.append(path)
    return written
