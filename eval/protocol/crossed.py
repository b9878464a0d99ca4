"""Means over runs that differ in a random choice, such as a calibration, with intervals over prompts and choices.

All runs have the same prompts, so prompts and runs are crossed: a value is the sum of the mean, effects of its
prompt and run, and a residual. The variance of the mean comes from the mean squares of the two-way analysis of
variance (Searle, Casella and McCulloch, Variance Components, 1992), its degrees of freedom from Satterthwaite
(Biometrics Bulletin 2, 1946), as for several readers of the same cases (Hillis, Statistics in Medicine 26, 2007).

For five runs, a bootstrap of prompts and runs (Owen, Annals of Applied Statistics 1, 2007) is too narrow if runs
differ. A two-way cluster-robust error with one degree of freedom less than the number of runs (Cameron, Gelbach and
Miller, Journal of Business and Economic Statistics 29, 2011) is too wide if prompts differ more.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import numpy as np

from kvbench.eval.protocol.compare import (
    EvaluatorResults,
    compare_values,
    read_evaluator_results,
    read_shared_prompts,
)
from kvbench.eval.protocol.intervals import Floats, Interval, find_quantile, number_clusters
from kvbench.eval.protocol.scores import Metric, Score, make_metric, with_interval
from kvbench.eval.protocol.shares import wilson_interval


@dataclass(frozen=True)
class Crossed:
    """A metric over several runs.

    Attributes:
        mean: mean over the runs with an interval over prompts and runs, which needs values of samples or replicates.
        between: standard deviation between runs without the contribution of prompts; None without an interval.
    """

    mean: Metric
    between: float | None


def cross_runs(folders: Sequence[Path], against: Path | None = None) -> dict[str, Crossed]:
    """Return every metric for which all runs have a value.

    A metric with values per sample is averaged over the samples with finite values in all runs. A metric of the whole
    set is averaged over the runs, with an interval from their replicates.

    Args:
        folders: folders of two or more finished runs.
        against: folder of a run whose values are subtracted by sample; correct and wrong answers then have no interval.

    Raises:
        SampleSetError: the runs have different samples.
    """
    every = [*folders, *([] if against is None else [against])]
    [prompts, *_] = [read_shared_prompts(every[0], other) for other in every[1:]]
    metrics = {}
    for path in sorted((every[0] / "metrics").glob("*.json")):
        paths = [folder / "metrics" / path.name for folder in every]
        if all(one.is_file() for one in paths):
            records = [read_evaluator_results(one) for one in paths]
            base = None if against is None else records.pop()
            for name in records[0].scores:
                if (crossed := _cross_metric(name, records, base, prompts)) is not None:
                    metrics[name] = crossed
    return metrics


def _cross_metric(
    name: str, records: Sequence[EvaluatorResults], base: EvaluatorResults | None, prompts: Mapping[int, str]
) -> Crossed | None:
    scores = [one for record in records if (one := _find_score(name, record, base)) is not None]
    values = [score.value for score in scores if score.value is not None]
    if len(values) < len(records):
        return None
    first, spec = records[0], records[0].scores[name][1]
    mean, between = Score(float(np.mean(values)), min(score.n for score in scores)), None
    columns = [_read_column(name, record, base) for record in records]
    known = [index for index in prompts if all(index in column for column in columns)]
    table, answers = _spread_replicates(scores), False
    if known:
        data = np.array([[column[index] for column in columns] for index in known])
        strata = [None if spec.strata is None else str(first.rows[index][spec.strata]) for index in known]
        table = sum_clusters(data, [prompts[index] for index in known], strata)
        mean, answers = Score(float(table.mean()), len(known)), {-1.0, 0.0, 1.0}.issuperset(data.flat)
    if table is not None and len(table) > 1 and not (answers and base):
        interval, between = cross_interval(table, shares=answers)
        mean = with_interval(mean, interval)
    return Crossed(make_metric(mean, spec, evaluator=first.evaluator, protocol=first.protocol), between)


def _find_score(name: str, record: EvaluatorResults, base: EvaluatorResults | None) -> Score | None:
    """Return a run's score of a metric, or its difference to `base`."""
    if base is None:
        return record.scores[name][0] if name in record.scores else None
    sides = [side.scores[name][0] for side in (record, base) if name in side.scores]
    return compare_values(*sides) if len(sides) == 2 else None


def _read_column(name: str, record: EvaluatorResults, base: EvaluatorResults | None) -> dict[int, float]:
    """Return a run's finite values of a metric by sample, or their differences to `base`."""
    column = {
        index: float(value)
        for index, row in record.rows.items()
        if isinstance(value := row.get(name), int | float) and isfinite(value)
    }
    if base is None:
        return column
    theirs = _read_column(name, base, None)
    return {index: value - theirs[index] for index, value in column.items() if index in theirs}


def sum_clusters(
    values: Floats, clusters: Sequence[Hashable], strata: Sequence[Hashable] | None = None
) -> Floats:
    """Return a table [clusters, runs] whose column means are the runs' means over samples.

    A cell is the run's mean plus the deviation of the cluster's samples, times the number of clusters.

    Args:
        values: value of each sample in each run, [samples, runs].
        clusters: prompt of each sample.
        strata: group of each sample, if a run's mean is the mean of group means.
    """
    members = number_clusters(clusters)
    groups = number_clusters(strata or [None] * len(values))
    sizes = np.bincount(groups)
    means = np.zeros((len(sizes), values.shape[1]))
    np.add.at(means, groups, values)
    means /= sizes[:, None]  # after the sum, for an exact mean of equal answers
    count = int(members.max()) + 1
    table = np.tile(means.mean(0), (count, 1))
    np.add.at(table, members, count * (values - means[groups]) / (len(sizes) * sizes[groups, None]))
    return table


def _spread_replicates(scores: Sequence[Score]) -> Floats | None:
    """Return a table [parts, runs] of pseudo-values as `sum_clusters`, or None if the parts differ."""
    columns = []
    for score in scores:
        own, first = score.replicates, scores[0].replicates
        if own is None or first is None or score.value is None or None in own.values:
            return None
        if (own.method, len(own.values)) != (first.method, len(first.values)):
            return None
        parts = np.array(own.values, np.float64)
        columns.append(score.value + own.spread * len(parts) ** 0.5 * (parts.mean() - parts))
    return np.stack(columns, 1)


def cross_interval(table: Floats, *, shares: bool = False) -> tuple[Interval, float]:
    """Return the interval of the mean of a table, and the standard deviation between its columns.

    A negative variance of an effect becomes zero, so the standard error is at least the standard error of the row means
    and of the column means. The standard deviation between columns excludes the residual of the cells.

    Args:
        table: [prompts, runs], two or more of each.
        shares: values are correct (1) and wrong (0) answers, with Wilson's interval for the number of independent
            answers of the same variance.
    """
    rows, runs = table.shape
    mean, by_row, by_run = table.mean(), table.mean(1, keepdims=True), table.mean(0, keepdims=True)
    rest = float(np.square(table - by_row - by_run + mean).sum()) / ((rows - 1) * (runs - 1))
    of_rows = max(runs * float(np.square(by_row - mean).sum()) / (rows - 1), rest)
    of_runs = max(rows * float(np.square(by_run - mean).sum()) / (runs - 1), rest)
    total = of_rows + of_runs - rest
    uncertainty = of_rows**2 / (rows - 1) + of_runs**2 / (runs - 1) + rest**2 / ((rows - 1) * (runs - 1))
    free = total**2 / uncertainty if uncertainty else rows - 1
    quantile, se = find_quantile(free + 1), (total / table.size) ** 0.5
    between = ((of_runs - rest) / rows) ** 0.5
    if shares:
        effective = mean * (1 - mean) / se**2 if se else rows
        return wilson_interval(float(mean), float(effective), quantile), between
    reach = quantile * se
    return Interval(float(mean - reach), float(mean + reach), se, f"two-way, t {free:.1f}"), between
