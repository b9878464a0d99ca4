"""Table over calibrations: a row joins the runs that differ only in the seed of their calibration."""

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

SHARED_SETTINGS = (
    "method",
    "prompts",
    "storage",
    "seed",
    "cache_dtype",
    "batch_size",
    "batch_invariant",
    "device",
)
"""Settings that joined runs share, besides the calibration's settings; a shared reference implies the model's."""


def group_calibrations(runs: Sequence[Results]) -> list[list[Results]]:
    """Return the runs of each row, which differ only in the seed of their calibration.

    A method without a calibration has a row of one run if a row of several runs has its reference and budget.

    Args:
        runs: finished runs; the latest run of a seed counts.
    """
    groups: dict[Hashable, dict[str, Results]] = {}
    for run in order_runs(sorted(runs, key=lambda run: run.finished)):
        if not is_full(run):
            groups.setdefault(_find_row(run), {})[str(run.setting("calibrate.seed"))] = run
    rows = [[group[seed] for seed in sorted(group)] for group in groups.values()]
    joined = {_find_group(row[0]) for row in rows if len(row) > 1}
    return [
        row for row in rows if len(row) > 1 or (_find_group(row[0]) in joined and not _is_calibrated(row[0]))
    ]


def _find_row(run: Results) -> Hashable:
    """Return the key that the runs of a row share."""
    calibrate = run.setting("calibrate")
    others = {**calibrate, "seed": None, "orders": None} if isinstance(calibrate, Mapping) else {}
    return run.method, _find_group(run), hash_values([others, *map(run.setting, SHARED_SETTINGS)])


def _find_group(run: Results) -> Hashable:
    """Return the key that the runs of comparable rows share."""
    return run.model, run.reference, run.n, run.memory.allowed


def _is_calibrated(run: Results) -> bool:
    return (run.provenance or {}).get("calibration_sha256") is not None


def make_calibration_rows(runs: Sequence[Results], runs_dir: Path, against: str | None = None) -> list[Row]:
    """Return a row per method and budget with the mean and standard deviation of each metric over calibrations.

    With `against`, a method without a calibration is subtracted sample by sample.

    Returns:
        No rows if no two runs differ only in calibration, or if `against` has no single run at their budget.
    """
    groups = group_calibrations(runs)
    bases = [group[0] for group in groups if group[0].method == against and len(group) == 1]
    several = Counter(map(_find_group, bases))
    partners = {_find_group(run): run for run in bases if several[_find_group(run)] == 1}
    if against is not None:
        groups = [group for group in groups if partners.get(_find_group(group[0]), group[0]) is not group[0]]
    measured = [_measure(group, runs_dir, partners.get(_find_group(group[0]))) for group in groups]
    names = [name for name in list_metrics(runs) if any(name in one for one in measured)]
    rows: list[Row] = []
    columns = identifying_columns([group[0] for group in groups])
    for which, group, one in zip(columns, groups, measured, strict=True):
        count, prompts = str(len(group)), str(group[0].setting("calibrate.count"))
        joined = (count, prompts) if len(group) > 1 else ("-", "-")
        counts = {"calibrations": joined[0], "of prompts": joined[1], "n": str(group[0].n)}
        rows.append({**which, **counts, **_list_cells(names, one)})
    return rows


def _measure(group: Sequence[Results], runs_dir: Path, partner: Results | None) -> Mapping[str, Crossed]:
    """Return the metrics of a row, or their differences to the partner's."""
    folders = [runs_dir / run.model / run.run for run in group]
    theirs = None if partner is None else runs_dir / partner.model / partner.run
    if len(group) > 1:
        return cross_runs(folders, theirs)
    single = group[0].metrics if theirs is None else compare_runs(folders[0], theirs)
    return {name: Crossed(metric, None) for name, metric in single.items()}


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
    """Print the table over calibrations and the table of differences to a method; write both as Markdown.

    Nothing is printed if no two runs differ only in calibration.

    The files report-calibrations.md and report-calibrations-against-<method>.md are written to `output`. Without
    `against` there are no differences.
    """
    for base in dict.fromkeys((None, against)):
        if rows := make_calibration_rows(runs, runs_dir, base):
            what = "means" if base is None else f"mean differences to {base}"
            title = f"Over calibrations: {what}, 95 % intervals over prompts and calibrations, sd between calibrations"
            path = output / f"report-calibrations{'' if base is None else f'-against-{base}'}.md"
            publish(console, title, rows, list(rows[0]).index("n") + 1, path)
