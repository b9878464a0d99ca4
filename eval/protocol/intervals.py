"""95 % intervals: bootstrap over prompts for means, jackknife for distances between distributions.

FID and related distances are not bootstrapped: repeated images shrink the covariance and bias the value. Intervals of
shares of correct answers (means of zeros and ones), and of their differences, have a positive width for equal values.
"""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000  # bootstrap resamples of a mean
STATISTIC_RESAMPLES = 500
"""Bootstrap resamples of a statistic that is computed anew for each."""
GROUPS = 20  # maximum number of groups of a jackknife
MIN_GROUPS = 5  # fewer groups give a poor standard error
SEED = 0  # of all resamples, groups and subsets
NORMAL_QUANTILE = 1.959964  # 97.5 % quantile of the normal distribution
NORMAL_CLUSTERS = 50
"""Number of clusters from which the normal distribution replaces Student's."""
MAX_DRAWS = 1 << 24  # maximum number of random integers in memory

Floats = NDArray[np.float64]
Statistic = Callable[[NDArray[np.int64]], float]
"""Function from the positions of samples, int64 [kept], to a value."""
Group = TypeVar("Group", bound=Hashable)
Cluster = TypeVar("Cluster", bound=Hashable)


@dataclass(frozen=True)
class Replicates:
    """Values of a statistic on parts of the samples.

    The parts depend only on prompts and a seed, so replicates of two runs of the same samples are paired: their
    differences are replicates of the difference.

    Attributes:
        values: value of each part; a non-finite value is written as None.
        spread: standard error of the statistic divided by the standard deviation (ddof 1) of `values`.
        method: description of the parts.
    """

    values: tuple[float | None, ...]
    spread: float
    method: str

    @classmethod
    def from_groups(cls, values: Floats, clusters: Sequence[Hashable]) -> "Replicates":
        """Return the replicates of a delete-a-group jackknife.

        Args:
            values: values [groups] without each group of `assign_groups`.
            clusters: prompt of each sample.
        """
        groups = len(values)
        within = " within classes" if are_classes(clusters) else ""
        method = f"jackknife {groups} groups{within} seed {SEED}"
        return cls(tuple(values.tolist()), (groups - 1) / groups**0.5, method)

    def subtract(self, other: "Replicates") -> "Replicates | None":
        """Return the replicates of a difference, or None if parts differ or a value is not finite."""
        if (self.method, len(self.values)) != (other.method, len(other.values)):
            return None
        pairs = zip(self.values, other.values, strict=True)
        values = tuple(a - b for a, b in pairs if a is not None and b is not None)
        return replace(self, values=values) if len(values) == len(self.values) else None

    def surround(self, value: float) -> "Interval":
        """Return Student's interval around `value`, the statistic of all samples."""
        se = float(self.spread * np.std(np.array(self.values, np.float64), ddof=1))
        reach = find_quantile(len(self.values)) * se
        return Interval(value - reach, value + reach, se, self.method, self)


@dataclass(frozen=True)
class Interval:
    """A 95 % interval.

    Attributes:
        low: lower end.
        high: upper end.
        se: standard error.
        method: description of the method.
        replicates: replicates behind the interval; None if they are not recorded.
        bias: jackknife estimate of the bias from the number of samples, which the interval does not correct.
        df: degrees of freedom of Student's quantile, for intervals over several runs; else None.
    """

    low: float
    high: float
    se: float
    method: str
    replicates: Replicates | None = None
    bias: float | None = None
    df: float | None = None

    def clip(self, low: float, high: float) -> "Interval":
        """Return the interval clipped to the possible values of the statistic."""
        return replace(self, low=max(self.low, low), high=min(self.high, high))


def find_quantile(clusters: float) -> float:
    """Return half the width of a 95 % interval in standard errors.

    It is the 97.5 % quantile of Student's distribution with `clusters` - 1 degrees of freedom, or of the normal
    distribution from 50 clusters. An effective number of clusters may be fractional.
    """
    if clusters >= NORMAL_CLUSTERS:
        return NORMAL_QUANTILE
    from scipy.special import stdtrit  # slow to import, and not needed for finished runs

    return float(stdtrit(clusters - 1, 0.975))


def percentile_interval(estimates: Floats, method: str) -> Interval:
    """Return the interval between the 2.5 and 97.5 percentiles of resampled estimates [resamples].

    If estimates are infinite (resamples with identical images only), percentiles are not interpolated and the standard
    error is nan.
    """
    finite = bool(np.isfinite(estimates).all())
    low, high = np.percentile(estimates, (2.5, 97.5), method="linear" if finite else "nearest")
    return Interval(float(low), float(high), float(estimates.std(ddof=1)) if finite else float("nan"), method)


def resample_means(values: Sequence[float], clusters: Sequence[Hashable] | None = None) -> Floats:
    """Return means float64 [resamples] of `values` after drawing whole clusters with replacement.

    `clusters` has the prompt of each sample; by default each sample is a cluster.
    """
    data = np.asarray(values, np.float64)
    members = np.arange(len(data)) if clusters is None else number_clusters(clusters)
    count = int(members.max()) + 1
    sums, sizes = np.bincount(members, data, count), np.bincount(members, minlength=count)
    rng = np.random.default_rng(SEED)
    step = max(1, MAX_DRAWS // count)
    means = []
    for start in range(0, RESAMPLES, step):
        drawn = rng.integers(count, size=(min(step, RESAMPLES - start), count))
        means.append(sums[drawn].sum(1) / sizes[drawn].sum(1))
    return np.concatenate(means)


def bootstrap(
    values: Sequence[float],
    clusters: Sequence[Hashable] | None = None,
    transform: Callable[[Floats], Floats] | None = None,
) -> Interval | None:
    """Return the percentile bootstrap of the mean, or of a function of the mean; None below two clusters.

    Resamples of few clusters vary too little, by (n - 1) / n, and ignore the uncertainty of the variance. Below 50
    clusters the interval is therefore widened around the value; for normal values it is then Student's interval.
    """
    count = len(set(clusters if clusters is not None else range(len(values))))
    if count < 2:
        return None
    means, centre = resample_means(values, clusters), np.array([np.mean(values)])
    estimates, [value] = (means, centre) if transform is None else (transform(means), transform(centre))
    interval = percentile_interval(estimates, f"bootstrap {RESAMPLES} seed {SEED}")
    return interval if count >= NORMAL_CLUSTERS else _widen(interval, float(value), count)


def combine_strata(values: Sequence[float], intervals: Sequence[Interval | None]) -> Interval | None:
    """Return the interval of the mean of independent strata from the interval of each, or None if one is missing.

    The squared distances from values to the ends of their intervals are added (Newcombe, Statistics in Medicine 17,
    1998, method 10), which keeps asymmetric intervals, for example of a share near 1, asymmetric.
    """
    known = [interval for interval in intervals if interval is not None]
    if len(known) < len(values):
        return None
    centre, count = math.fsum(values) / len(values), len(values)
    pairs = list(zip(values, known, strict=True))
    below, above, se = (
        math.hypot(*distances) / count
        for distances in zip(*((v - i.low, i.high - v, i.se) for v, i in pairs), strict=True)
    )
    return Interval(centre - below, centre + above, se, f"stratified {known[0].method}")


def split_groups(
    samples: Iterable[tuple[Group, float, Cluster]],
) -> dict[Group, tuple[list[float], list[Cluster]]]:
    """Return values and clusters of each group, from group, value and cluster of each sample."""
    groups: dict[Group, tuple[list[float], list[Cluster]]] = {}
    for group, value, cluster in samples:
        values, clusters = groups.setdefault(group, ([], []))
        values.append(value)
        clusters.append(cluster)
    return groups


def are_classes(clusters: Sequence[Hashable]) -> bool:
    """Return whether prompts are class numbers, which are a fixed set instead of a sample."""
    return all(isinstance(cluster, str) and cluster.isdigit() for cluster in clusters)


def assign_groups(clusters: Sequence[Hashable]) -> NDArray[np.int64]:
    """Return the group of each sample, int64 [samples], from the prompt or class number of each sample.

    Prompts are a sample: whole prompts are assigned in seeded random order to at most `GROUPS` groups. Classes are not
    a sample: each class is spread over all groups, whose number is the largest from `MIN_GROUPS` to `GROUPS` that
    divides the size of every class, or `GROUPS` if none does.
    """
    rng = np.random.default_rng(SEED)
    if not are_classes(clusters):
        members = number_clusters(clusters)
        count = int(members.max()) + 1
        dealt: NDArray[np.int64] = rng.permutation(count) % min(GROUPS, count)
        return dealt[members]
    common = math.gcd(*Counter(clusters).values())
    even = [number for number in range(MIN_GROUPS, GROUPS + 1) if common % number == 0]
    # Samples are dealt one class after another, each in random order.
    order = rng.permutation(len(clusters))
    order = order[np.argsort(number_clusters(clusters)[order], kind="stable")]
    assigned = np.empty(len(clusters), np.int64)
    assigned[order] = np.arange(len(clusters)) % min(max(even, default=GROUPS), len(clusters))
    return assigned


def leave_out(statistic: Statistic, clusters: Sequence[Hashable]) -> Replicates | None:
    """Return the replicates of a delete-a-group jackknife (`assign_groups`), None if fewer than two samples remain."""
    dealt = assign_groups(clusters)
    rest = [np.flatnonzero(dealt != group) for group in range(int(dealt.max()) + 1)]
    if min(map(len, rest)) < 2:
        return None
    return Replicates.from_groups(np.array([statistic(positions) for positions in rest]), clusters)


def jackknife(statistic: Statistic, value: float, clusters: Sequence[Hashable]) -> Interval | None:
    """Return the jackknife interval around `value`, the statistic of all samples; None if `leave_out` returns None.

    The interval covers the variation between sets of n samples. The effect of n itself (a FID falls with n) is
    estimated by `bias`, (groups - 1) x (mean of the replicates - value), up to terms of 1 / n^2 (Quenouille, 1956).
    """
    replicates = leave_out(statistic, clusters)
    if replicates is None:
        return None
    without = np.array(replicates.values, np.float64)
    return replace(replicates.surround(value), bias=float((len(without) - 1) * (without.mean() - value)))


def resample_statistic(statistic: Statistic, value: float, clusters: Sequence[Hashable]) -> Interval | None:
    """Return the percentile bootstrap of a statistic that is not a function of means; None below two clusters.

    Whole clusters are drawn with replacement. The interval is widened for few clusters as by `bootstrap`. Its
    replicates give differences between runs of the same clusters an interval.

    Args:
        statistic: the statistic; samples of clusters that are drawn several times have repeated positions.
        value: the statistic of all samples.
        clusters: cluster of each sample.
    """
    members = number_clusters(clusters)
    count = int(members.max()) + 1
    if count < 2:
        return None
    positions = [np.flatnonzero(members == cluster) for cluster in range(count)]
    drawn = np.random.default_rng(SEED).integers(count, size=(STATISTIC_RESAMPLES, count))
    estimates = np.array([statistic(np.concatenate([positions[i] for i in row])) for row in drawn])
    method = f"bootstrap {STATISTIC_RESAMPLES} seed {SEED}"
    replicates = Replicates(tuple(estimates.tolist()), _find_factor(count), method)
    return replace(_widen(percentile_interval(estimates, method), value, count), replicates=replicates)


def _find_factor(clusters: int) -> float:
    """Return the factor by which an interval of few clusters is widened."""
    return math.sqrt(clusters / (clusters - 1)) * find_quantile(clusters) / NORMAL_QUANTILE


def _widen(interval: Interval, value: float, clusters: int) -> Interval:
    """Return an interval of few clusters, widened around the value; its method names the degrees of freedom."""
    factor, se = _find_factor(clusters), math.sqrt(clusters / (clusters - 1)) * interval.se
    low, high = (float(value + factor * (end - value)) for end in (interval.low, interval.high))
    return Interval(low, high, se, f"{interval.method}, t {clusters - 1}")


def number_clusters(clusters: Sequence[Hashable]) -> NDArray[np.int64]:
    """Return the index of each sample's cluster, int64 [samples], from 0 in order of appearance."""
    indices: dict[Hashable, int] = {}
    return np.array([indices.setdefault(cluster, len(indices)) for cluster in clusters], np.int64)


def share_interval(
    values: Sequence[float], clusters: Sequence[Hashable] | None = None, *, whole: float = 1
) -> Interval | None:
    """Return Wilson's interval of a mean of shares; None below two clusters.

    For clustered samples, or values between 0 and 1, the effective number of samples is used: the number of independent
    zeros and ones whose mean has the same variance (Korn and Graubard, Statistical Methods in Medical Research 5,
    1996). If all values are 0, or all are 1, it is the number of clusters.

    Args:
        values: value of each sample, from 0 to `whole`.
        clusters: cluster (prompt) of each sample; None makes each sample a cluster.
        whole: value of a correct sample, 100 for percentages.
    """
    data = np.asarray(values, np.float64) / whole
    members = number_clusters(range(len(data)) if clusters is None else clusters)
    sums, sizes = np.bincount(members, data), np.bincount(members)
    if len(sums) < 2:
        return None
    share = float(data.mean())
    variance = float(np.square(sums - share * sizes).sum()) / len(data) ** 2
    effective = share * (1 - share) / variance if variance > 0 else len(sums)
    # The variance of independent zeros and ones follows from the share: the quantile is then the normal one.
    plain = len(sums) == len(data) and {0.0, 1.0}.issuperset(data.tolist())
    interval = wilson_interval(share, effective, NORMAL_QUANTILE if plain else find_quantile(len(sums)))
    return replace(interval, low=whole * interval.low, high=whole * interval.high, se=whole * interval.se)


def change_interval(values: Sequence[float], clusters: Sequence[Hashable] | None = None) -> Interval | None:
    """Return the interval of the mean difference (-1, 0 or 1) of paired answers; None below two clusters.

    Half an answer is added to each of the four kinds of pairs (Agresti and Min, Statistics in Medicine 24, 2005), so
    equal answers still have an interval of positive width. With clusters it is half a cluster of the mean size, and
    deviations are summed by cluster.
    """
    data = np.asarray(values, np.float64)
    members = number_clusters(range(len(data)) if clusters is None else clusters)
    sums, sizes = np.bincount(members, data), np.bincount(members)
    if len(sums) < 2:
        return None
    size = float(sizes.mean())
    count = len(data) + 2 * size
    centre = float(data.sum()) / count
    # The last summand is of the added pairs: halves of -1, 0, 0 and 1.
    squares = np.square(sums - centre * sizes).sum() + size**2 * (1 + 2 * centre**2)
    se = float(np.sqrt(squares)) / count
    reach = find_quantile(len(sums)) * se
    return Interval(centre - reach, centre + reach, se, "agresti-min").clip(-1, 1)


def wilson_interval(share: float, count: float, quantile: float = NORMAL_QUANTILE) -> Interval:
    """Return the interval of a share (0 to 1) of `count` independent samples (Wilson, JASA 22, 1927).

    `count` may be fractional; `quantile` is half the width in standard errors.
    """
    weight = 1 / (1 + quantile**2 / count)
    centre = weight * share + (1 - weight) / 2
    se = weight * float(np.sqrt(share * (1 - share) / count + (quantile / (2 * count)) ** 2))
    # A share of 0 or 1 must be an end of its interval despite rounding.
    low, high = min(centre - quantile * se, share), max(centre + quantile * se, share)
    return Interval(low, high, se, "wilson").clip(0, 1)
