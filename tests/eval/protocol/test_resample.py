"""Bootstrap of statistics that are no function of means, beside the bootstrap of means and a loop."""

import numpy as np
import pytest

from kvbench.eval.protocol.intervals import (
    SEED,
    STATISTIC_RESAMPLES,
    bootstrap,
    find_quantile,
    resample_statistic,
)

CLUSTERS = [f"text {number // 2}" for number in range(24)]
VALUES = np.random.default_rng(1).gamma(1.0, size=24)


def test_a_quantile_is_resampled_by_cluster() -> None:
    def find(positions: np.ndarray) -> float:
        return float(np.quantile(VALUES[positions], 0.9))

    interval = resample_statistic(find, find(np.arange(24)), CLUSTERS)
    rows = np.random.default_rng(SEED).integers(12, size=(STATISTIC_RESAMPLES, 12))
    slow = []
    for row in rows:
        drawn = [VALUES[2 * cluster + one] for cluster in row for one in (0, 1)]
        slow.append(np.quantile(drawn, 0.9))
    factor = np.sqrt(12 / 11) * find_quantile(12) / 1.959964
    value, ends = find(np.arange(24)), np.percentile(slow, (2.5, 97.5))
    assert interval is not None
    assert (interval.low, interval.high) == pytest.approx(
        tuple(value + factor * (end - value) for end in ends)
    )
    assert interval.replicates is not None
    assert interval.replicates.values == pytest.approx(slow)


def test_of_a_mean_it_is_the_bootstrap_of_means() -> None:
    mean = float(VALUES.mean())
    ours = resample_statistic(lambda positions: float(VALUES[positions].mean()), mean, CLUSTERS)
    plain = bootstrap(VALUES.tolist(), CLUSTERS)
    assert ours is not None
    assert plain is not None
    assert (ours.low, ours.high) == pytest.approx((plain.low, plain.high), rel=0.05)


def test_one_cluster_has_no_interval() -> None:
    assert resample_statistic(lambda _: 1.0, 1.0, ["one"] * 5) is None
