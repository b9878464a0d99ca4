"""Means over runs that differ in a random choice, such as a seed or a calibration.

All runs have the same prompts, and the intervals are over prompts and choices.

Prompts and runs are crossed: a value is the sum of the mean, effects of its prompt and run, and a residual. The
variance of the mean comes from the mean squares of the two-way analysis of variance (Searle, Casella and McCulloch,
Variance Components, 1992), its degrees of freedom from Satterthwaite (Biometrics Bulletin 2, 1946), as for several
readers of the same cases (Hillis, Statistics in Medicine 26, 2007).

For five runs, a bootstrap of prompts and runs (Owen, Annals of Applied Statistics 1, 2007) is too narrow if runs
differ much. A two-way cluster-robust error with one degree of freedom less than the number of runs (Cameron, Gelbach
and Miller, Journal of Business and Economic Statistics 29, 2011) is too wide if prompts vary more than runs.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path

import numpy as np

from kvbench.eval.protocol.compare import (
    EvaluatorResults,
    compare_values,
    read_evaluator_results,
    read_prompts,
)
from kvbench.eval.protocol.intervals import (
    Floats,
    Interval,
    change_interval,
    combine_strata,
    find_quantile,
    number_clusters,
    split_groups,
    wilson_interval,
)
from kvbench.eval.protocol.ranges import Range, find_difference_range, find_range
from kvbench.eval.protocol.scores import Metric, Score, are_answers, are_shares, make_metric, with_interval

MIN_RUNS = 3
"""Minimum number of runs whose values alone give an interval."""
Choice = Sequence[Hashable]
"""Random choices of a run, such as the seeds of its noise and of its calibration."""


@dataclass(frozen=True)
class Crossed:
    """A metric over several runs.

    Attributes:
        mean: mean over the runs with an interval over prompts and runs, which needs values of samples, replicates or
            three runs.
        between: standard deviation between runs without the contribution of prompts; None without an interval.
        df: degrees of freedom of the interval; None without an interval.
        prompts_only: whether the interval is over prompts alone, because an interval over prompts and runs would be
            wider than the metric's range (`kvbench.eval.protocol.ranges`).
    """

    mean: Metric
    between: float | None
    df: float | None = None
    prompts_only: bool = False


@dataclass(frozen=True)
class _Runs:
    """Records of an evaluator in several runs.

    Attributes:
        records: results of each run.
        bases: results of the run that is subtracted from each run; None if none is subtracted.
        prompts: prompt of each sample by index.
        choices: random choices of each run.
    """

    records: Sequence[EvaluatorResults]
    bases: Sequence[EvaluatorResults | None]
    prompts: Mapping[int, str]
    choices: Sequence[Choice]

    @property
    def are_differences(self) -> bool:
        """Whether values of another run are subtracted."""
        return self.bases[0] is not None

    def find_limits(self, name: str) -> Range | None:
        """Return the range of a metric, or of its differences."""
        return find_difference_range(name) if self.are_differences else find_range(name)


@dataclass(frozen=True)
class _Found:
    """An interval, the standard deviation between runs, and whether the interval is over prompts alone."""

    interval: Interval
    between: float
    prompts_only: bool = False


def cross_runs(
    folders: Sequence[Path], against: Path | Sequence[Path] | None = None, choices: Sequence[Choice] = ()
) -> dict[str, Crossed]:
    """Return every metric for which all runs have a value.

    A metric with values per sample is averaged over the samples with finite values in all runs. A metric of the whole
    set is averaged over the runs, with an interval from their replicates or, without these, from three or more runs:
    the wider of Student's over the runs and the mean of their own. Replicates without variation leave the latter.

    Args:
        folders: folders of two or more finished runs with the same prompts; seeds may differ.
        against: folder of a run whose values are subtracted by sample, or one such folder for each run.
        choices: random choices of each run, such as its seed and its calibration's; by default each run is a choice of
            its own. If several kinds of choices differ, the widest of their intervals counts.

    Raises:
        SampleSetError: the runs have different prompts, or a run and its subtracted run different samples.
    """
    partners = [against] * len(folders) if isinstance(against, Path) else list(against or ())
    prompts = read_prompts(folders, partners)
    choices = choices or [(number,) for number in range(len(folders))]
    metrics = {}
    for path in sorted((folders[0] / "metrics").glob("*.json")):
        every = dict.fromkeys([*folders, *partners])
        paths = {folder: folder / "metrics" / path.name for folder in every}
        if all(file.is_file() for file in paths.values()):
            read = {folder: read_evaluator_results(file) for folder, file in paths.items()}
            bases = [read[folder] for folder in partners] if partners else [None] * len(folders)
            runs = _Runs([read[folder] for folder in folders], bases, prompts, choices)
            for name in runs.records[0].scores:
                if (crossed := _cross_metric(name, runs)) is not None:
                    metrics[name] = crossed
    return metrics


def _cross_metric(name: str, runs: _Runs) -> Crossed | None:
    scores = [
        score
        for record, base in zip(runs.records, runs.bases, strict=True)
        if (score := _find_score(name, record, base)) is not None and score.value is not None
    ]
    if len(scores) < len(runs.records):
        return None
    first, spec = runs.records[0], runs.records[0].scores[name][1]
    mean, found = _cross_samples(name, runs, spec.strata) or _cross_scores(name, runs, scores)
    where = {"evaluator": first.evaluator, "protocol": first.protocol}
    metric = make_metric(with_interval(mean, None if found is None else found.interval), spec, **where)
    if found is None:
        return Crossed(metric, None)
    return Crossed(metric, found.between, found.interval.df, found.prompts_only)


def _cross_samples(name: str, runs: _Runs, strata: str | None) -> tuple[Score, _Found | None] | None:
    """Return the mean of a metric over samples and runs; None if no sample has a value in all runs."""
    columns = [_read_column(name, *pair) for pair in zip(runs.records, runs.bases, strict=True)]
    known = [index for index in runs.prompts if all(index in column for column in columns)]
    if not known:
        return None
    data = np.array([[column[index] for column in columns] for index in known])
    rows, clusters = runs.records[0].rows, [runs.prompts[index] for index in known]
    groups = [None if strata is None else str(rows[index][strata]) for index in known]
    table = sum_clusters(data, clusters, groups)
    first = runs.records[0].scores[name][0]
    shares = not runs.are_differences and are_shares(first.ci) and {0.0, 1.0}.issuperset(data.flat)
    found = _find_interval(table, runs.choices, runs.find_limits(name), shares=shares)
    if found is not None and not shares and are_answers(first.ci) and {-1.0, 0.0, 1.0}.issuperset(data.flat):
        found = _widen_change(found, data, clusters, groups)
    return Score(float(table.mean()), len(known)), found


def _cross_scores(name: str, runs: _Runs, scores: Sequence[Score]) -> tuple[Score, _Found | None]:
    """Return the mean of a metric of the whole set over runs."""
    values = [score.value for score in scores if score.value is not None]
    mean = Score(float(np.mean(values)), min(score.n for score in scores))
    own, limits = _average_intervals(scores), runs.find_limits(name)
    table = _spread_replicates(scores)
    if table is not None:
        found = _find_interval(table, runs.choices, limits)
        if found is not None and own is not None and _width(found.interval) == 0:  # such as shares of 1
            found = replace(found, interval=own)
        return mean, found
    averaged = [kind[0] for kind in _average_choices(np.array([values]), runs.choices)]
    averaged = averaged or [np.array(values)]
    if min(map(len, averaged)) < MIN_RUNS:
        return mean, None
    intervals = [*(_find_student(one, "over runs") for one in averaged), *([own] if own else [])]
    interval = max(intervals, key=_width)
    between = float(np.std(values, ddof=1))
    return mean, _Found(interval if limits is None else interval.clip(*limits), between)


def _average_intervals(scores: Sequence[Score]) -> Interval | None:
    """Return the mean of the runs' own intervals, which are over prompts; None if a run has none."""
    low, high = np.array([score.ci95 or (None, None) for score in scores], np.float64).mean(0).tolist()
    if not (isfinite(low) and isfinite(high)):
        return None
    return Interval(low, high, float(np.mean([score.se or 0.0 for score in scores])), f"{scores[0].ci}")


def _find_interval(
    table: Floats, choices: Sequence[Choice], limits: Range | None, *, shares: bool = False
) -> _Found | None:
    """Return the interval of a table [prompts, runs], the widest if several kinds of choices differ.

    If it is wider than the metric's range, the interval over prompts alone replaces it. It is clipped to the range.
    """
    if len(table) < 2 or table.shape[1] < 2:
        return None
    interval, between = cross_interval(table, shares=shares)
    averaged = [cross_interval(means, shares=shares)[0] for means in _average_choices(table, choices)]
    interval = max(averaged, key=_width, default=interval)
    if limits is None:
        return _Found(interval, between)
    alone = _width(interval) > limits[1] - limits[0]
    return _Found(
        (_find_student(table.mean(1), "over prompts") if alone else interval).clip(*limits), between, alone
    )


def _average_choices(table: Floats, choices: Sequence[Choice]) -> list[Floats]:
    """Return a table [prompts, levels] for each kind of choices that differs, averaged over the runs of a level."""
    return [
        np.stack([table[:, levels == level].mean(1) for level in range(int(levels.max()) + 1)], 1)
        for levels in map(number_clusters, zip(*choices, strict=True))
        if levels.max() > 0
    ]


def _width(interval: Interval) -> float:
    return interval.high - interval.low


def _widen_change(
    found: _Found, data: Floats, clusters: Sequence[Hashable], groups: Sequence[str | None]
) -> _Found:
    """Return the wider of an interval and `change_interval` over prompts, which has a width if all answers agree."""
    rows = zip(groups, data, clusters, strict=True)
    members = split_groups((group, value, cluster) for group, values, cluster in rows for value in values)
    means = [float(np.mean(values)) for values, _ in members.values()]
    intervals = [change_interval(*stratum) for stratum in members.values()]
    change = intervals[0] if len(intervals) == 1 else combine_strata(means, intervals)
    if change is None or _width(found.interval) > _width(change):
        return found
    return replace(found, interval=replace(change, df=len(set(clusters)) - 1))


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


def _spread_replicates(scores: Sequence[Score]) -> Floats | None:
    """Return a table [parts, runs] of pseudo-values like `sum_clusters`, or None if the parts differ."""
    columns = []
    for score in scores:
        replicates, first = score.replicates, scores[0].replicates
        if replicates is None or first is None or score.value is None or None in replicates.values:
            return None
        if (replicates.method, len(replicates.values)) != (first.method, len(first.values)):
            return None
        parts = np.array(replicates.values, np.float64)
        columns.append(score.value + replicates.spread * len(parts) ** 0.5 * (parts.mean() - parts))
    return np.stack(columns, 1)


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
    means /= sizes[:, None]  # divided after the sum, so that the mean of equal answers is exact
    count = int(members.max()) + 1
    table = np.tile(means.mean(0), (count, 1))
    np.add.at(table, members, count * (values - means[groups]) / (len(sizes) * sizes[groups, None]))
    return table


def cross_interval(table: Floats, *, shares: bool = False) -> tuple[Interval, float]:
    """Return the interval of the mean of a table, and the standard deviation between its columns.

    A negative variance of an effect becomes zero, so the standard error is at least the standard error of the row means
    and of the column means. The standard deviation between columns excludes the residual of the cells.

    Two runs that differ no more than their residuals get the degrees of freedom of the prompts: the single one of two
    runs would give an interval several times as wide as needed.

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


def _find_student(values: Floats, kind: str) -> Interval:
    """Return Student's interval of the mean of independent values."""
    mean, free = float(values.mean()), len(values) - 1
    se = float(values.std(ddof=1)) / len(values) ** 0.5
    reach = find_quantile(free + 1) * se
    return Interval(mean - reach, mean + reach, se, f"{kind}, t {free}", df=free)
