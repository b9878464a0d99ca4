"""Metric specifications, scores with intervals, and entries of results.json, which combine both."""

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Literal

import numpy as np

from kvbench.eval.protocol.intervals import (
    Cluster,
    Interval,
    Replicates,
    Statistic,
    bootstrap,
    jackknife,
    share_interval,
    split_groups,
)
from kvbench.eval.protocol.records import read_fields, strict

Better = Literal["higher", "lower"]
Status = Literal["ok", "skipped", "failed"]


@dataclass(frozen=True)
class MetricSpec:
    """Meaning and display of a metric, declared in `metrics` of its evaluator.

    Attributes:
        better: the better direction.
        unit: unit of the value.
        digits: number of decimals.
        detail: whether it is a part or variant of another metric, which is not shown in comparisons of runs.
        strata: column with the group of each sample, if the value is the mean of group means; else None.
    """

    better: Better
    unit: str = ""
    digits: int = 4
    detail: bool = False
    strata: str | None = None


def with_parts(name: str, whole: MetricSpec, parts: Iterable[str]) -> dict[str, MetricSpec]:
    """Return the specifications of a metric and its parts, `<name>/<part>`, which are details without strata."""
    spec = replace(whole, detail=True, strata=None)
    return {name: whole} | {f"{name}/{part}": spec for part in parts}


@dataclass
class Score:
    """Value of a metric and its uncertainty.

    Attributes:
        value: the value; None if it was not computed or is infinite.
        n: number of samples.
        sd: standard deviation over samples (ddof 1).
        se: standard error.
        ci95: 95 % interval; an infinite end is written as None.
        ci: method of the interval.
        bias: jackknife estimate of the bias from the number of samples, see `jackknife`.
        replicates: values on parts of the samples, which give differences between runs an interval; None for means over
            samples, which are compared by sample.
    """

    value: float | None
    n: int = 0
    sd: float | None = None
    se: float | None = None
    ci95: tuple[float | None, float | None] | None = None
    ci: str | None = None
    bias: float | None = None
    replicates: Replicates | None = None


@dataclass(frozen=True)
class Metric:
    """One entry under `metrics` of results.json: a score, its `MetricSpec` and the evaluator's status.

    Attributes:
        value: see `Score` for this field and `n`, `sd`, `se`, `ci95`, `ci` and `bias`.
        better: see `MetricSpec` for this field and `unit`, `digits` and `detail`.
        status: see `Result` for this field and `reason`, `evaluator`, `protocol` and `needs_reference`.
        nonfinite: number of non-finite values of this entry, which became null.
    """

    value: float | None
    better: Better
    unit: str = ""
    n: int = 0
    sd: float | None = None
    se: float | None = None
    ci95: tuple[float | None, float | None] | None = None
    ci: str | None = None
    bias: float | None = None
    status: Status = "ok"
    reason: str | None = None
    evaluator: str = ""
    protocol: str = ""
    digits: int = 4
    detail: bool = False
    needs_reference: bool = False
    nonfinite: int = 0

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval, if both ends are finite."""
        low, high = self.ci95 or (None, None)
        return None if low is None or high is None else (low, high)


def are_shares(ci: str | None) -> bool:
    """Return whether samples are right or wrong answers, by the method of their interval."""
    return "wilson" in (ci or "")


def are_answers(ci: str | None) -> bool:
    """Return whether samples are right or wrong answers or changes of them, by the method of their interval."""
    return are_shares(ci) or "agresti-min" in (ci or "")


def make_metric(score: Score, spec: MetricSpec, **more: object) -> Metric:
    """Combine a score, its `MetricSpec` and other fields of `Metric` in one strict entry."""
    values = {**asdict(replace(score, replicates=None)), **asdict(spec), **more}
    return read_fields(Metric, strict(values))


def mean_score(
    values: Sequence[float],
    clusters: Sequence[Hashable] | None = None,
    find_interval: Callable[..., Interval | None] = bootstrap,
) -> Score:
    """Return the mean over samples with its interval.

    Args:
        values: value of each sample.
        clusters: cluster (prompt) of each sample; None makes each sample a cluster.
        find_interval: function from values and clusters to the interval, or to None.
    """
    sd = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return with_interval(Score(float(np.mean(values)), len(values), sd), find_interval(values, clusters))


def share_score(
    values: Sequence[float], clusters: Sequence[Hashable] | None = None, *, whole: float = 1
) -> Score:
    """Return the mean of correct (`whole`) and wrong (0) samples, or shares in between; see `share_interval`."""
    return mean_score(values, clusters, partial(share_interval, whole=whole))


def score_parts(
    metric: str,
    names: Collection[str],
    samples: Iterable[tuple[str, float, Cluster]],
    average: Callable[[Sequence[float], Sequence[Cluster]], Score],
) -> dict[str, Score]:
    """Return the score of each part that has samples, `<metric>/<name>`, from part, value and cluster of samples."""
    parts = split_groups(samples)
    return {f"{metric}/{name}": average(*parts[name]) for name in names if name in parts}


def jackknife_score(statistic: Statistic, clusters: Sequence[Hashable]) -> Score:
    """Return a statistic of all samples with its jackknife interval and bias; see `leave_out`."""
    value = statistic(np.arange(len(clusters)))
    return with_interval(Score(value, len(clusters)), jackknife(statistic, value, clusters))


def cut_interval(score: Score, bounds: tuple[float, float] | None) -> Score:
    """Return the score with its interval cut at the metric's bounds, which `ci` then names; the value stays inside."""
    low, high = score.ci95 or (None, None)
    if bounds is None or score.value is None or low is None or high is None:
        return score
    cut = max(low, min(bounds[0], score.value)), min(high, max(bounds[1], score.value))
    if cut == (low, high):
        return score
    return replace(score, ci95=cut, ci=f"{score.ci}, cut at [{bounds[0]:g}, {bounds[1]:g}]")


def with_interval(score: Score, interval: Interval | None) -> Score:
    """Return the score with an interval, or unchanged without one."""
    if interval is None:
        return score
    ends, how = (interval.low, interval.high), interval.method
    return replace(
        score, se=interval.se, ci95=ends, ci=how, bias=interval.bias, replicates=interval.replicates
    )
