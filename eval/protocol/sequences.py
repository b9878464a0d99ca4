"""Confidence sequences: intervals of a mean that hold for all numbers of samples at once.

A fixed-sample interval holds at one number of samples that is chosen in advance. A race looks after every block and
stops when the differences decide, so its error adds up over looks; a confidence sequence bounds it for all looks.
"""

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
NARROWEST = 64
"""Number of samples at which `normal_sequence` is narrowest for its error."""
MAX_BET = 0.75
"""Upper bound c of the bets in `bounded_sequence`; the paper suggests 1/2 or 3/4."""


def normal_sequence(values: Floats, error: float) -> tuple[Floats, Floats]:
    """Return both ends [...] of each mean's interval after all values, from an asymptotic confidence sequence.

    The sequence is Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas (arXiv:2103.06476), Theorem 2.2, for independent
    samples with a finite variance. It covers the mean at all times from the first look on with a probability that
    tends to `1 - error` as the first look is later.

    Args:
        values: `[..., samples]`, two or more samples of each mean, in the order in which they were drawn.
        error: probability that the mean is ever outside, 0 to 1.
    """
    count = values.shape[-1]
    tuned = -2 * math.log(error)
    rho2 = (tuned + math.log(tuned + 1)) / NARROWEST
    scale = 2 * (count * rho2 + 1) / (count**2 * rho2) * math.log(math.sqrt(count * rho2 + 1) / error)
    reach = values.std(-1) * math.sqrt(scale)
    mean = values.mean(-1)
    return mean - reach, mean + reach


def bounded_sequence(values: Floats, error: float, low: float, high: float) -> tuple[Floats, Floats]:
    """Return both ends [...] of the interval of each mean of bounded values, valid at every number of samples.

    This is the empirical Bernstein sequence of Waudby-Smith and Ramdas (arXiv:2010.09686), Theorem 2, with its
    predictable plug-in bets. It assumes only that values are from `low` to `high`.

    Args:
        values: `[..., samples]`, samples of each mean in the order in which they were drawn.
        error: probability that the mean is ever outside, 0 to 1.
        low: smallest possible value.
        high: largest possible value.

    Raises:
        ValueError: a value is not from `low` to `high`.
    """
    if not (low <= values.min() and values.max() <= high):
        raise ValueError(f"values lie in {values.min():g}..{values.max():g}, not in {low:g}..{high:g}")
    unit = (values - low) / (high - low)
    times = np.arange(1, unit.shape[-1] + 1)
    means = (0.5 + unit.cumsum(-1)) / (times + 1)
    variances = (0.25 + ((unit - means) ** 2).cumsum(-1)) / (times + 1)
    before, spread = _shift(means, 0.5), _shift(variances, 0.25)
    bets = np.minimum(np.sqrt(2 * math.log(2 / error) / (spread * times * np.log1p(times))), MAX_BET)
    cost = (4 * (unit - before) ** 2 * (-np.log1p(-bets) - bets) / 4).sum(-1)
    total = bets.sum(-1)
    centre, reach = (bets * unit).sum(-1) / total, (math.log(2 / error) + cost) / total
    width = high - low
    return low + width * np.maximum(centre - reach, 0.0), low + width * np.minimum(centre + reach, 1.0)


def _shift(values: Floats, first: float) -> Floats:
    """Shift values [..., samples] by one sample, `first` in front."""
    start = np.full_like(values[..., :1], first)
    return np.concatenate((start, values[..., :-1]), -1)
