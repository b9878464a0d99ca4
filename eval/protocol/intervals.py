"""95 % intervals: bootstrap over prompts for means, jackknife for distances between distributions.

FID and its kin are never bootstrapped: repeated images shrink the covariance and move the value itself. Shares of
right answers have intervals of their own, in `shares`.
"""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
GROUPS = 20
MIN_GROUPS = 5  # fewer estimate a standard error too badly
SEED = 0
NORMAL = 1.959964  # 97.5 % quantile of the normal distribution
MANY = 50
"""Clusters from which on the normal distribution stands for Student's."""
BLOCK = 1 << 24  # numbers drawn at a time

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Replicates:
    """Values of a statistic on parts of the samples.

    The parts follow from the samples' prompts and a seed alone, so replicates of two runs of the same samples belong
    together one by one: the differences between them are replicates of the difference.

    Attributes:
        values: one a part; one that is not finite is None once it was written.
        spread: standard error of the statistic over the standard deviation (ddof 1) of `values`.
        method: how the parts were made.
    """

    values: tuple[float | None, ...]
    spread: float
    method: str

    @classmethod
    def from_groups(cls, values: Floats, clusters: Sequence[Hashable]) -> "Replicates":
        """Return the replicates of a delete-a-group jackknife.

        Args:
            values: found without each of the groups that `assign_groups` deals, [groups].
            clusters: the prompt of each sample.
        """
        groups = len(values)
        within = " within classes" if are_classes(clusters) else ""
        method = f"jackknife {groups} groups{within} seed {SEED}"
        return cls(tuple(values.tolist()), (groups - 1) / groups**0.5, method)

    def subtract(self, other: "Replicates") -> "Replicates | None":
        """Return the replicates of a difference; None if the parts are not the same or have no finite value."""
        if (self.method, len(self.values)) != (other.method, len(other.values)):
            return None
        pairs = zip(self.values, other.values, strict=True)
        values = tuple(a - b for a, b in pairs if a is not None and b is not None)
        return replace(self, values=values) if len(values) == len(self.values) else None

    def surround(self, value: float) -> "Interval":
        """Return the interval around `value`, the statistic of all samples.

        It reaches as many standard errors to both sides as Student's distribution says for so many parts.
        """
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
        method: how it was found.
        replicates: what it was found from, if these are worth keeping.
        bias: by how much the number of samples moves the value, as the jackknife estimates it; the interval does not
            make up for it.
    """

    low: float
    high: float
    se: float
    method: str
    replicates: Replicates | None = None
    bias: float | None = None

    def clip(self, low: float, high: float) -> "Interval":
        """Return the interval without what lies outside of the values that the statistic can have."""
        return replace(self, low=max(self.low, low), high=min(self.high, high))


def find_quantile(clusters: float) -> float:
    """Return how many standard errors a 95 % interval reaches to one side.

    It is the 97.5 % quantile of Student's distribution with one degree of freedom less than there are clusters, and
    that of the normal distribution from 50 clusters on. The number need not be whole where it is an effective one.
    """
    if clusters >= MANY:
        return NORMAL
    from scipy.special import stdtrit  # takes half a second, which a table of finished runs need not wait for

    return float(stdtrit(clusters - 1, 0.975))


def percentile_interval(estimates: Floats, method: str) -> Interval:
    """Return the interval between the 2.5 and 97.5 percentiles of resampled estimates [resamples].

    With infinite ones among them (resamples of identical images only) it ends at estimates instead of between two, and
    has no standard error (nan).
    """
    finite = bool(np.isfinite(estimates).all())
    low, high = np.percentile(estimates, (2.5, 97.5), method="linear" if finite else "nearest")
    return Interval(float(low), float(high), float(estimates.std(ddof=1)) if finite else float("nan"), method)


def resample_means(
    values: Sequence[float],
    clusters: Sequence[Hashable] | None = None,
    *,
    resamples: int = RESAMPLES,
    seed: int = SEED,
) -> Floats:
    """Return means of `values` under resampling of whole clusters with replacement, float64 [resamples].

    Args:
        values: one a sample.
        clusters: the cluster (prompt) of each sample; by default each sample is its own.
        resamples: how many means.
        seed: seed of the draws.
    """
    data = np.asarray(values, np.float64)
    members = np.arange(len(data)) if clusters is None else number_clusters(clusters)
    count = int(members.max()) + 1
    sums, sizes = np.bincount(members, data, count), np.bincount(members, minlength=count)
    rng = np.random.default_rng(seed)
    step = max(1, BLOCK // count)
    means = []
    for start in range(0, resamples, step):
        drawn = rng.integers(count, size=(min(step, resamples - start), count))
        means.append(sums[drawn].sum(1) / sizes[drawn].sum(1))
    return np.concatenate(means)


def bootstrap(
    values: Sequence[float],
    clusters: Sequence[Hashable] | None = None,
    transform: Callable[[Floats], Floats] | None = None,
) -> Interval | None:
    """Return the percentile bootstrap of the mean, or of a function of the mean; None below two clusters.

    Resamples of few clusters vary too little, by (n - 1) / n, and know nothing of how uncertain that variation itself
    is. Below 50 clusters the interval is therefore stretched around the value: for normal values it is then Student's.
    """
    count = len(set(clusters if clusters is not None else range(len(values))))
    if count < 2:
        return None
    means, centre = resample_means(values, clusters), np.array([np.mean(values)])
    estimates, [value] = (means, centre) if transform is None else (transform(means), transform(centre))
    found = percentile_interval(estimates, f"bootstrap {RESAMPLES} seed {SEED}")
    if count >= MANY:
        return found
    missing = math.sqrt(count / (count - 1))
    factor = missing * find_quantile(count) / NORMAL
    low, high = (float(value + factor * (end - value)) for end in (found.low, found.high))
    return Interval(low, high, missing * found.se, f"{found.method}, t {count - 1}")


def combine_strata(values: Sequence[float], intervals: Sequence[Interval | None]) -> Interval | None:
    """Return the interval of the mean of independent strata's values, out of the interval of each.

    The distances from the values to the ends of their intervals are added as squares (Newcombe, Statistics in Medicine
    17, 1998, method 10), so that a stratum whose interval is lopsided, such as that of a share near 1, stays so. None
    if a stratum has no interval.

    Args:
        values: one a stratum.
        intervals: one a stratum.
    """
    known = [interval for interval in intervals if interval is not None]
    if len(known) < len(values):
        return None
    centre, count = math.fsum(values) / len(values), len(values)
    pairs = list(zip(values, known, strict=True))
    below, above, se = (
        math.hypot(*distances) / count
        for distances in zip(*((v - one.low, one.high - v, one.se) for v, one in pairs), strict=True)
    )
    return Interval(centre - below, centre + above, se, f"stratified {known[0].method}")


def are_classes(clusters: Sequence[Hashable]) -> bool:
    """Tell whether prompts are class numbers, a fixed set that is no sample of anything."""
    return all(isinstance(cluster, str) and cluster.isdigit() for cluster in clusters)


def assign_groups(clusters: Sequence[Hashable], groups: int = GROUPS) -> NDArray[np.int64]:
    """Return the group of each sample, int64 [samples].

    Prompts are a sample of prompts: they are dealt whole, in seeded random order, to at most `groups` groups. Classes
    are not: each is spread over the groups, for without a class the others say nothing of it. The number of groups is
    then the largest one, from 5 up to `groups`, into which every class can be dealt evenly, if there is one.

    Args:
        clusters: the prompt of each sample, or the number of its class.
        groups: into how many groups they are dealt.
    """
    rng = np.random.default_rng(SEED)
    if not are_classes(clusters):
        members = number_clusters(clusters)
        count = int(members.max()) + 1
        dealt: NDArray[np.int64] = rng.permutation(count) % min(groups, count)
        return dealt[members]
    common = math.gcd(*Counter(clusters).values())
    even = [number for number in range(MIN_GROUPS, groups + 1) if common % number == 0]
    # One class after another, the samples of each in random order, like cards to players.
    order = rng.permutation(len(clusters))
    order = order[np.argsort(number_clusters(clusters)[order], kind="stable")]
    found = np.empty(len(clusters), np.int64)
    found[order] = np.arange(len(clusters)) % min(max(even, default=groups), len(clusters))
    return found


def leave_out(
    statistic: Callable[[NDArray[np.int64]], float], clusters: Sequence[Hashable], groups: int = GROUPS
) -> Replicates | None:
    """Return the values of a statistic without each group of clusters, replicates of a delete-a-group jackknife.

    Args:
        statistic: value of the samples at the given positions, on both sides of a pair.
        clusters: the prompt of each sample, or the number of its class; see `assign_groups`.
        groups: into how many groups they are dealt.

    Returns:
        None when leaving out a group leaves fewer than two samples.
    """
    dealt = assign_groups(clusters, groups)
    kept = [np.flatnonzero(dealt != group) for group in range(int(dealt.max()) + 1)]
    if min(len(k) for k in kept) < 2:
        return None
    return Replicates.from_groups(np.array([statistic(k) for k in kept]), clusters)


def jackknife(
    statistic: Callable[[NDArray[np.int64]], float], value: float, clusters: Sequence[Hashable]
) -> Interval | None:
    """Return the jackknife interval around `value`, the statistic of all samples; None where `leave_out` has none.

    It says how much other samples, equally many, would move the value. What their number does to it (a FID falls as
    samples are added) is not in the interval but in its `bias`: the groups' number less one, times the mean without a
    group less the value (Quenouille, 1956), which is right up to terms of 1 / n^2.
    """
    replicates = leave_out(statistic, clusters)
    if replicates is None:
        return None
    without = np.array(replicates.values, np.float64)
    return replace(replicates.surround(value), bias=float((len(without) - 1) * (without.mean() - value)))


def number_clusters(clusters: Sequence[Hashable]) -> NDArray[np.int64]:
    """Return the number of each sample's cluster, from 0 in the order in which clusters appear, int64 [samples]."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(cluster, len(numbers)) for cluster in clusters], np.int64)
