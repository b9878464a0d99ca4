"""Table over calibrations: one row for the runs that differ in their calibration's seed alone."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from kvbench.core.files import hash_values
from kvbench.eval.protocol.compare import compare_runs
from kvbench.eval.protocol.crossed import Crossed, cross_runs
from kvbench.report.ablations import is_full
from kvbench.report.runs_table import identifying_columns, list_metrics, order_runs
from kvbench.report.tables import Cell, Row, publish
from kvbench.runs.record.results import Results

SETTINGS = ("method", "prompts", "storage", "seed", "cache_dtype", "batch_size", "batch_invariant", "device")
"""Settings in which joined runs agree, beside those of the calibration; the reference stands for the model's."""


def group_calibrations(runs: Sequence[Results]) -> list[list[Results]]:
    """Return the runs of each row, which differ in their calibration's seed alone.

    Methods without a calibration have rows of one run, beside rows of several runs with the same reference and budget.

    Args:
        runs: finished ones; of two with one seed, which two versions made, the later one counts.
    """
    groups: dict[Hashable, dict[str, Results]] = {}
    for run in order_runs(sorted(runs, key=lambda run: run.finished)):
        if not is_full(run):
            groups.setdefault(_find_place(run), {})[str(run.setting("calibrate.seed"))] = run
    rows = [[group[seed] for seed in sorted(group)] for group in groups.values()]
    joined = {_find_rivals(row[0]) for row in rows if len(row) > 1}
    return [
        row for row in rows if len(row) > 1 or (_find_rivals(row[0]) in joined and not _is_calibrated(row[0]))
    ]


def _find_place(run: Results) -> Hashable:
    """Return what the runs of a row have in common."""
    calibrate = run.setting("calibrate")
    others = {**calibrate, "seed": None, "orders": None} if isinstance(calibrate, Mapping) else {}
    return run.method, _find_rivals(run), hash_values([others, *map(run.setting, SETTINGS)])


def _find_rivals(run: Results) -> Hashable:
    """Return what the runs of rows have in common that can be compared."""
    return run.model, run.reference, run.n, run.memory.allowed


def _is_calibrated(run: Results) -> bool:
    return (run.provenance or {}).get("calibration_sha256") is not None


def make_calibration_rows(runs: Sequence[Results], runs_dir: Path, against: str | None = None) -> list[Row]:
    """Return a row per method and budget: the mean over calibrations of each metric, and their standard deviation.

    Args:
        runs: finished ones.
        runs_dir: where their folders are.
        against: method without a calibration that is subtracted sample by sample; None for the metrics themselves.

    Returns:
        No row if no two runs differ in their calibration alone, or no single run of `against` is at their budget.
    """
    groups = group_calibrations(runs)
    bases = [group[0] for group in groups if group[0].method == against and len(group) == 1]
    several = Counter(map(_find_rivals, bases))
    partners = {_find_rivals(run): run for run in bases if several[_find_rivals(run)] == 1}
    if against is not None:
        groups = [group for group in groups if partners.get(_find_rivals(group[0]), group[0]) is not group[0]]
    measured = [_measure(group, runs_dir, partners.get(_find_rivals(group[0]))) for group in groups]
    names = [name for name in list_metrics(runs) if any(name in one for one in measured)]
    return [
        {**which, **_count(group), **_list_cells(names, one)}
        for which, group, one in zip(
            identifying_columns([group[0] for group in groups]), groups, measured, strict=True
        )
    ]


def _measure(group: Sequence[Results], runs_dir: Path, partner: Results | None) -> Mapping[str, Crossed]:
    """Return the metrics of a row, or their differences to a partner's."""
    folders = [runs_dir / run.model / run.run for run in group]
    theirs = None if partner is None else runs_dir / partner.model / partner.run
    if len(group) > 1:
        return cross_runs(folders, theirs)
    single = group[0].metrics if theirs is None else compare_runs(folders[0], theirs)
    return {name: Crossed(metric, None) for name, metric in single.items()}


def _count(group: Sequence[Results]) -> dict[str, Cell]:
    several = len(group) > 1
    return {
        "calibrations": str(len(group)) if several else "-",
        "of prompts": str(group[0].setting("calibrate.count")) if several else "-",
        "n": str(group[0].n),
    }


def _list_cells(names: Sequence[str], measured: Mapping[str, Crossed]) -> dict[str, Cell]:
    cells: dict[str, Cell] = {}
    for name in names:
        mean = between = None
        if name in measured:
            mean, between = measured[name].mean, measured[name].between
        cells[name] = mean
        cells[f"{name} sd"] = "-" if mean is None or between is None else f"{between:.{mean.digits}f}"
    return cells


def show_calibrations(
    console: Console, runs: Sequence[Results], runs_dir: Path, output: Path, against: str | None = None
) -> None:
    """Print the table over calibrations, and that of differences to a method; write both as Markdown.

    Nothing is printed if no two runs differ in their calibration alone.

    Args:
        console: where to print.
        runs: finished ones.
        runs_dir: where their folders are.
        output: folder of report-calibrations.md and report-calibrations-against-<method>.md.
        against: method of the differences; None for the first table alone.
    """
    for base in dict.fromkeys((None, against)):
        if rows := make_calibration_rows(runs, runs_dir, base):
            what = "means" if base is None else f"mean differences to {base}"
            title = f"Over calibrations: {what}, 95 % intervals over prompts and calibrations, sd between calibrations"
            path = output / f"report-calibrations{'' if base is None else f'-against-{base}'}.md"
            publish(console, title, rows, list(rows[0]).index("n") + 1, path)
