"""Tables for a paper: methods by budgets, or other rows and columns, with some metrics and significant best values."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kvbench.core.config import ConfigError
from kvbench.core.settings import ReportSettings
from kvbench.core.suggestions import suggest
from kvbench.eval.protocol.scores import Metric
from kvbench.report.code_notes import list_marks
from kvbench.report.conditions import find_conditions, find_group, is_full
from kvbench.report.differences import find_pairs
from kvbench.report.memory import name_percent
from kvbench.report.runs_table import choose_metrics, find_metric, list_metrics, name_methods, order_runs
from kvbench.report.seeds import READ_ERRORS, compare_seeds, count_seeds
from kvbench.report.tables import Style, choose_style
from kvbench.runs.record.results import Results

INTERVAL_NOTE = "± half of the 95 % interval, or its ends."
BOLD_NOTE = (
    "Bold: the best value, if the 95 % interval of its paired difference to the second best leaves zero."
)
Values = Mapping[str, Mapping[str, Metric | None]]
"""Metrics by name of a run's folder and of the metric."""
CellKey = tuple[str, str, str | None]
"""Row, metric and column of a cell."""


@dataclass(frozen=True)
class PaperTable:
    """A table of metrics.

    Attributes:
        title: what tells it from other tables.
        caption: the title, how values were measured, and what is bold.
        head: kind of the rows.
        metrics: an example of each metric by name.
        cells: metrics by row, name and column; the column is None where an uncompressed run's value spans all columns.
        best: keys of the bold cells.
    """

    title: str
    caption: str
    head: str
    metrics: Mapping[str, Metric]
    cells: Mapping[CellKey, Metric]
    best: frozenset[CellKey]

    @cached_property
    def rows(self) -> list[str]:
        """Labels of the rows, rows without compression first."""
        return list(
            dict.fromkeys(row for row, _, _ in sorted(self.cells, key=lambda key: key[2] is not None))
        )

    @cached_property
    def columns(self) -> list[str]:
        """Labels of the columns of each metric."""
        return list(dict.fromkeys(column for _, _, column in self.cells if column is not None))

    @cached_property
    def styles(self) -> dict[str, Style]:
        """Style of each metric's intervals (`choose_style`)."""
        return {
            name: choose_style(cell for (_, metric, _), cell in self.cells.items() if metric == name)
            for name in self.metrics
        }


KINDS: Mapping[str, Callable[[Results], str]] = {
    "model": lambda run: run.model_label,
    "prompts": lambda run: run.prompts_label,
    "method": lambda run: run.method,
    "budget": lambda run: name_percent(run.memory).replace(" of the full cache", ""),
}
"""Labels of rows and columns; methods are named with the settings in which their runs differ (`name_methods`)."""
Labels = Mapping[str, Mapping[str, str]]
"""Labels by name of a run's folder and by kind."""


def check_metrics(runs: Sequence[Results], names: Sequence[str]) -> None:
    """Check that runs have the metrics of `report.metrics`.

    Raises:
        ConfigError: a metric has no value in any run.
    """
    known = list_metrics(runs, details=True)
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"report.metrics: no finished run has {unknown[0]!r}{suggest(unknown[0], known)}")


def make_paper_tables(
    runs: Sequence[Results], runs_dir: Path, layout: ReportSettings, against: str | None = None
) -> list[PaperTable]:
    """Return a table for each model, prompt set and number of samples, or what else is neither row nor column.

    `runs` are finished runs below `runs_dir` as `combine_seeds` returns them; bounds of references are left out. Each
    table is followed by one of paired differences to `against`, a method or the name of a run.

    Raises:
        ConfigError: no run is `against`, or several at one budget.
    """
    ordered = order_runs([run for run in runs if not (is_full(run) and run.reference is not None)])
    labels = _label_runs(ordered)
    partners = {} if against is None else {run.run: other for run, other in find_pairs(runs, against)}
    tables = []
    for title, group in _group_runs(ordered, labels, layout).items():
        values = {run.run: {name: find_metric(run, name) for name in run.metrics} for run in group}
        best = find_significant(group, runs_dir, choose_metrics(group, layout.metrics))
        tables.append(_make_table(", ".join(title), group, values, labels, layout, best))
        pairs = [run for run in group if run.run in partners]
        changes: Values = {run.run: compare_seeds(run, partners[run.run], runs_dir) for run in pairs}
        title = (*title[:-1], f"differences to {against}, paired by prompt and seed", title[-1])
        tables.append(_make_table(", ".join(title), pairs, changes, labels, layout))
    return [table for table in tables if table.metrics]


def find_significant(runs: Sequence[Results], runs_dir: Path, names: Sequence[str]) -> set[tuple[str, str]]:
    """Return the significantly best values of metrics, as pairs of a run's name and a metric.

    The runs that compress with one model, prompt set, budget and set of seeds compete. A value is best if the 95 %
    interval of its difference to the second best, paired by prompt and seed, excludes zero.
    """
    groups: dict[Hashable, list[Results]] = {}
    for run in runs:
        if find_group(run) is not None:
            groups.setdefault(find_group(run), []).append(run)
    best: set[tuple[str, str]] = set()
    for group in groups.values():
        differences: dict[tuple[str, str], Mapping[str, Metric]] = {}
        for name in names:
            ranked = _rank(group, name)
            if len(ranked) > 1:
                first, second = ranked[:2]
                pair = first.run, second.run
                if pair not in differences:
                    differences[pair] = _compare(first, second, runs_dir)
                interval = differences[pair][name].interval if name in differences[pair] else None
                if interval is not None and (interval[0] > 0 or interval[1] < 0):
                    best.add((first.run, name))
    return best


def _rank(runs: Sequence[Results], name: str) -> list[Results]:
    """Return the runs with a value of a metric, the best first."""
    known = [
        (metric.value * (-1 if metric.better == "higher" else 1), index)
        for index, run in enumerate(runs)
        if (metric := find_metric(run, name)) is not None and metric.value is not None
    ]
    return [runs[index] for _, index in sorted(known)]


def _compare(run: Results, other: Results, runs_dir: Path) -> Mapping[str, Metric]:
    """Return the paired differences of two runs; none if samples are missing or damaged."""
    try:
        return compare_seeds(run, other, runs_dir)
    except READ_ERRORS:
        return {}


def _label_runs(runs: Sequence[Results]) -> Labels:
    """Return the labels of runs; the method of a run that equals an earlier one in all labels ends with its hash."""
    labels: dict[str, dict[str, str]] = {}
    seen: set[Hashable] = set()
    for run, method in zip(runs, name_methods(runs), strict=True):
        names = {kind: find(run) for kind, find in KINDS.items()} | {"method": method}
        if (*names.values(), run.n) in seen:
            names["method"] = f"{method} {run.run.rpartition('-')[2]}"
        seen.add((*names.values(), run.n))
        labels[run.run] = names
    return labels


def _group_runs(
    runs: Sequence[Results], labels: Labels, layout: ReportSettings
) -> dict[tuple[str, ...], list[Results]]:
    """Return the runs of each table by its shared labels and samples, references first.

    A reference belongs to every table of its conditions and noise, unless budgets are rows.
    """
    rest = [kind for kind in KINDS if kind not in (layout.rows, layout.columns)]
    groups: dict[tuple[str, ...], list[Results]] = {}
    for run in runs:
        if not is_full(run):
            count = f" x {noises}" if (noises := count_seeds(run)[0]) > 1 else ""
            shared = *(labels[run.run][kind] for kind in rest), f"n = {run.n}{count}"
            groups.setdefault(shared, []).append(run)
    references = [run for run in runs if is_full(run)]
    if layout.rows == "budget" or "method" not in (layout.rows, layout.columns):
        return groups
    for group in groups.values():
        alike = {(find_conditions(run), run.noise) for run in group}
        group[:0] = [run for run in references if (find_conditions(run), run.noise) in alike]
    return groups


def _make_table(
    title: str,
    runs: Sequence[Results],
    values: Values,
    labels: Labels,
    layout: ReportSettings,
    best: set[tuple[str, str]] | None = None,
) -> PaperTable:
    """Return the table of a group of runs; with `best`, the cells that are bold."""
    names = choose_metrics(runs, layout.metrics)
    cells: dict[CellKey, Metric] = {}
    bold: set[CellKey] = set()
    for run in runs:
        row, column = (labels[run.run][kind] for kind in (layout.rows, layout.columns))
        spans = is_full(run) and layout.columns == "budget"
        for name in names:
            metric = values[run.run].get(name)
            if metric is None or metric.value is None:
                continue
            key = row, name, None if spans else column
            cells[key] = metric
            if best and (run.run, name) in best:
                bold.add(key)
    known = {name: metric for (_, name, _), metric in reversed(cells.items())}
    metrics = {name: known[name] for name in names if name in known}
    note = "" if best is None else f" {BOLD_NOTE}"
    notes = "".join(f" {mark}" for mark in list_marks(runs, cells.values(), df="subscripts", peaks=False))
    caption = f"{title}. {INTERVAL_NOTE}{note}{notes}"
    return PaperTable(title, caption, layout.rows, metrics, cells, frozenset(bold))
