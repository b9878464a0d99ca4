"""Metric specifications, scores with intervals, and the entries of results.json that join the two."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvbench.eval.protocol.intervals import Interval, Replicates, bootstrap, jackknife
from kvbench.eval.protocol.records import read_fields, strict
from kvbench.eval.protocol.shares import share_interval

Better = Literal["higher", "lower"]
Status = Literal["ok", "skipped", "failed"]


@dataclass(frozen=True)
class MetricSpec:
    """Meaning and display of one metric; an evaluator declares it once, in `metrics`.

    Attributes:
        better: which direction is better.
        unit: its unit.
        digits: digits after the point.
        detail: a part or a variant of another metric, such as one task of a benchmark: shown with its run and in CSV,
            left out where runs are compared.
        strata: column of the samples that names each sample's group, where the value is the mean of the groups' means;
            None where it is the mean over samples, or no mean at all.
    """

    better: Better
    unit: str = ""
    digits: int = 4
    detail: bool = False
    strata: str | None = None


def with_parts(name: str, whole: MetricSpec, parts: Iterable[str]) -> dict[str, MetricSpec]:
    """Return a metric and its parts, `<name>/<part>`, which are details and not means of strata."""
    part = replace(whole, detail=True, strata=None)
    return {name: whole} | {f"{name}/{one}": part for one in parts}


@dataclass
class Score:
    """The value of a metric and its uncertainty.

    Attributes:
        value: None if it was not computed or is infinite.
        n: samples behind it.
        sd: standard deviation over samples (ddof 1).
        se: standard error.
        ci95: 95 % interval; an end that is infinite is None once it was written.
        ci: how the interval was found.
        bias: by how much the number of samples moves the value, estimated by the jackknife: the value less its bias is
            nearer to that of infinitely many samples. The interval is about values of equally many samples.
        replicates: values on parts of the samples, from which differences to another run get their interval; None for
            means over samples, which are compared sample by sample.
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
        value: see `Score`, as for `n`, `sd`, `se`, `ci95`, `ci` and `bias`.
        better: see `MetricSpec`, as for `unit`, `digits` and `detail`.
        status: of the evaluator: ok, skipped (something is missing) or failed (an error).
        reason: why it was skipped or failed, or a caveat.
        evaluator: name of the evaluator.
        protocol: which definition of the metric it followed.
        needs_reference: whether it compares with a reference run.
        nonfinite: numbers of this entry that were not finite and became null.
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
        """The 95 % interval where both of its ends are finite."""
        low, high = self.ci95 or (None, None)
        return None if low is None or high is None else (low, high)


def make_metric(score: Score, spec: MetricSpec, **more: object) -> Metric:
    """Join a score, its `MetricSpec` and further fields of `Metric` into one strict entry."""
    values = {**asdict(replace(score, replicates=None)), **asdict(spec), **more}
    return read_fields(Metric, strict(values))


def mean_score(
    values: Sequence[float],
    clusters: Sequence[Hashable] | None = None,
    find_interval: Callable[..., Interval | None] = bootstrap,
) -> Score:
    """Return the mean over samples with its interval.

    Args:
        values: one a sample.
        clusters: the cluster (prompt) of each sample, resampled as a whole; by default each sample is its own.
        find_interval: function of values and clusters, `change_interval` for differences between right (1) and wrong
            (0) answers.
    """
    sd = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return with_interval(Score(float(np.mean(values)), len(values), sd), find_interval(values, clusters))


def share_score(
    values: Sequence[float], clusters: Sequence[Hashable] | None = None, *, whole: float = 1
) -> Score:
    """Return the mean of right (`whole`) and wrong (0), or of shares between, with an interval that ends where they do.

    Args:
        values: one a sample, from 0 to `whole`.
        clusters: the cluster (prompt) of each sample; by default each sample is its own.
        whole: value of a sample that is right, 100 for per cent.
    """
    return mean_score(values, clusters, partial(share_interval, whole=whole))


def jackknife_score(statistic: Callable[[NDArray[np.int64]], float], clusters: Sequence[Hashable]) -> Score:
    """Return a statistic of all samples with its jackknife interval and bias.

    Args:
        statistic: value of the samples at the given positions, on both sides of a pair.
        clusters: the prompt of each sample, or the number of its class.
    """
    value = statistic(np.arange(len(clusters)))
    return with_interval(Score(value, len(clusters)), jackknife(statistic, value, clusters))


def with_interval(score: Score, interval: Interval | None) -> Score:
    """Return the score with its interval, if there is one."""
    if interval is None:
        return score
    ends, how = (interval.low, interval.high), interval.method
    return replace(
        score, se=interval.se, ci95=ends, ci=how, bias=interval.bias, replicates=interval.replicates
    )
