"""95 % intervals of shares (means of zeros and ones) and of their differences, of positive width even if all agree."""

from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np

from kvbench.eval.protocol.intervals import NORMAL, Interval, find_quantile, number_clusters


def share_interval(
    values: Sequence[float], clusters: Sequence[Hashable] | None = None, *, whole: float = 1
) -> Interval | None:
    """Return Wilson's interval of a mean of shares; None below two clusters.

    Where samples come in clusters, or values are shares themselves, the number of samples is the effective one: so many
    independent zeros and ones would give the mean the variance that it has between clusters (Korn and Graubard,
    Statistical Methods in Medical Research 5, 1996). If all values are 0, or all are 1, it is the number of clusters.

    Args:
        values: one a sample, from 0 to `whole`.
        clusters: the cluster (prompt) of each sample; by default each sample is its own.
        whole: value of a sample that is right, 100 for per cent.
    """
    data = np.asarray(values, np.float64) / whole
    members = number_clusters(range(len(data)) if clusters is None else clusters)
    sums, sizes = np.bincount(members, data), np.bincount(members)
    if len(sums) < 2:
        return None
    share = float(data.mean())
    variance = float(np.square(sums - share * sizes).sum()) / len(data) ** 2
    effective = share * (1 - share) / variance if variance > 0 else len(sums)
    plain = len(sums) == len(data) and set(data.tolist()) <= {
        0.0,
        1.0,
    }  # their variance follows from the share
    found = wilson_interval(share, effective, NORMAL if plain else find_quantile(len(sums)))
    return replace(found, low=whole * found.low, high=whole * found.high, se=whole * found.se)


def change_interval(values: Sequence[float], clusters: Sequence[Hashable] | None = None) -> Interval | None:
    """Return the interval of the mean difference between paired right (1) and wrong (0) answers.

    There is none below two clusters.

    Half an answer is added to each of the four kinds of pairs (Agresti and Min, Statistics in Medicine 24, 2005), so
    that answers which are all equal do not pass for a difference that is certainly 0. With clusters it is half a
    cluster of the mean size, and deviations are summed by cluster.

    Args:
        values: differences, one a sample: -1, 0 or 1.
        clusters: the cluster (prompt) of each sample; by default each sample is its own.
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


def wilson_interval(share: float, count: float, quantile: float = NORMAL) -> Interval:
    """Return the interval of a share of `count` independent samples (Wilson, JASA 22, 1927).

    Args:
        share: from 0 to 1.
        count: of samples; an effective number need not be whole.
        quantile: how many standard errors it reaches.
    """
    weight = 1 / (1 + quantile**2 / count)
    centre = weight * share + (1 - weight) / 2
    se = weight * float(np.sqrt(share * (1 - share) / count + (quantile / (2 * count)) ** 2))
    # A share of 0 or 1 is an end of its interval, which rounding alone would miss.
    low, high = min(centre - quantile * se, share), max(centre + quantile * se, share)
    return Interval(low, high, se, "wilson").clip(0, 1)
