"""Intervals of tables of prompts and runs.

Prompts and runs are crossed: a value is the sum of the mean, effects of its prompt and run, and a residual. The
variance of the mean comes from the mean squares of the two-way analysis of variance (Searle, Casella and McCulloch,
Variance Components, 1992), its degrees of freedom from Satterthwaite (Biometrics Bulletin 2, 1946), as for several
readers of the same cases (Hillis, Statistics in Medicine 26, 2007).

For five runs, a bootstrap of prompts and runs (Owen, Annals of Applied Statistics 1, 2007) is too narrow if runs
differ. A two-way cluster-robust error with one degree of freedom less than the number of runs (Cameron, Gelbach and
Miller, Journal of Business and Economic Statistics 29, 2011) is too wide if prompts differ more.
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np

from kvbench.eval.protocol.intervals import Floats, Interval, find_quantile, number_clusters
from kvbench.eval.protocol.shares import wilson_interval

MIN_RUNS = 3
"""Fewest runs whose values alone give an interval."""


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


def cross_interval(table: Floats, *, shares: bool = False) -> tuple[Interval, float]:
    """Return the interval of the mean of a table, and the standard deviation between its columns.

    A negative variance of an effect becomes zero, so the standard error is at least the standard error of the row means
    and of the column means. The standard deviation between columns excludes the residual of the cells.

    Two runs that differ no more than their residuals have the degrees of freedom of the prompts: their own one would
    give an interval several times as wide as needed.

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
    if runs == 2 and of_runs == rest:
        free = rows - 1
    quantile, se = find_quantile(free + 1), (total / table.size) ** 0.5
    between = ((of_runs - rest) / rows) ** 0.5
    if shares:
        effective = mean * (1 - mean) / se**2 if se else rows
        return replace(wilson_interval(float(mean), float(effective), quantile), df=float(free)), between
    reach, method = quantile * se, f"two-way, t {free:.1f}"
    return Interval(float(mean - reach), float(mean + reach), se, method, df=float(free)), between


def prompts_interval(table: Floats) -> Interval:
    """Return Student's interval of the mean of a table [prompts, runs] over its prompts alone."""
    means = table.mean(1)
    se, free = float(means.std(ddof=1)) / len(means) ** 0.5, len(means) - 1
    reach = find_quantile(free + 1) * se
    mean = float(means.mean())
    return Interval(mean - reach, mean + reach, se, f"over prompts, t {free}", df=free)


def runs_interval(values: Sequence[float]) -> Interval | None:
    """Return Student's interval of the mean of independent runs; None for fewer than three."""
    if len(values) < MIN_RUNS:
        return None
    mean, free = float(np.mean(values)), len(values) - 1
    se = float(np.std(values, ddof=1)) / len(values) ** 0.5
    reach = find_quantile(free + 1) * se
    return Interval(mean - reach, mean + reach, se, f"over runs, t {free}", df=free)
