"""95 % intervals of shares (means of zeros and ones) and their differences, with positive width for equal values."""

from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np

from kvbench.eval.protocol.intervals import NORMAL_QUANTILE, Interval, find_quantile, number_clusters


def share_interval(
    values: Sequence[float], clusters: Sequence[Hashable] | None = None, *, whole: float = 1
) -> Interval | None:
    """Return Wilson's interval of a mean of shares; None below two clusters.

    For clustered samples, or values between 0 and 1, the effective number of samples is used: the number of independent
    zeros and ones whose mean has the same variance (Korn and Graubard, Statistical Methods in Medical Research 5,
    1996). If all values are 0, or all are 1, it is the number of clusters.

    Args:
        values: value of each sample, from 0 to `whole`.
        clusters: cluster (prompt) of each sample; by default each sample is a cluster.
        whole: value of a correct sample, 100 for per cent.
    """
    data = np.asarray(values, np.float64) / whole
    members = number_clusters(range(len(data)) if clusters is None else clusters)
    sums, sizes = np.bincount(members, data), np.bincount(members)
    if len(sums) < 2:
        return None
    share = float(data.mean())
    variance = float(np.square(sums - share * sizes).sum()) / len(data) ** 2
    effective = share * (1 - share) / variance if variance > 0 else len(sums)
    # The variance of independent zeros and ones follows from the share.
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
    change, size = float(data.mean()), float(sizes.mean())
    count = len(data) + 2 * size
    se = float(np.sqrt(np.square(sums - change * sizes).sum() + size**2)) / count
    centre, reach = float(data.sum()) / count, find_quantile(len(sums)) * se
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
