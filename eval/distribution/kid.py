"""Kernel distance between sets of features (Binkowski et al., arXiv:1801.01401), in float64."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvbench.eval.distribution.base import ToReference
from kvbench.eval.distribution.frechet import Features
from kvbench.eval.distribution.kernels import make_discrepancy
from kvbench.eval.protocol.component import setting
from kvbench.eval.protocol.intervals import SEED, Replicates
from kvbench.eval.protocol.scores import MetricSpec, Score, jackknife_score, with_interval

REPORTED = 1000  # papers print KID times 1000


@dataclass(frozen=True)
class Kid(ToReference):
    """`kid_paired_clean`, `kid_scenes`: squared maximum mean discrepancy to the reference run, times 1000.

    Both sides share their seeds, so pairs of the same sample are left out of the cross term too; counting them
    would make the estimate negative.

    Attributes:
        full_up_to: samples up to which all are used at once; above, the mean over subsets.
        subsets: how many.
        size: samples of a subset.
    """

    full_up_to: int = 10_000
    subsets: int = setting(100, 2)
    size: int = setting(1000, 2)
    name: ClassVar[str] = "kid"

    @property
    def metrics(self) -> Mapping[str, MetricSpec]:
        """One distance, named after the space."""
        return {f"kid_{self.space.paired}": MetricSpec("lower", "1e-3", digits=2)}

    def compare(self, ours: Features, others: Features, clusters: list[str]) -> dict[str, Score]:
        """Return the distance between both sides."""
        [name] = self.metrics
        if len(ours) <= self.full_up_to:
            return {name: paired_kid(ours, others, clusters)}
        # The error of the mean over subsets is their spread scaled to all samples (subsampling).
        size = min(self.size, len(ours))
        draws = draw_subsets(len(ours), self.subsets, size)
        values = REPORTED * np.array([kid(ours[draw], others[draw], paired=True) for draw in draws])
        method = f"subsampling {self.subsets} of {size} seed {SEED}"
        replicates = Replicates(tuple(values.tolist()), (size / len(ours)) ** 0.5, method)
        value = float(values.mean())
        return {name: with_interval(Score(value, len(ours)), replicates.surround(value))}


def kid(first: Features, second: Features, *, paired: bool = False) -> float:
    """Unbiased MMD^2 with the kernel (x.y / D + 1)^3.

    Args:
        first: [n, D].
        second: [m, D].
        paired: row i of both sides is the same sample; such pairs are left out of the cross term.

    Raises:
        ValueError: fewer than two samples, unequal dimensions, features that are not finite, or paired sets
            of unequal size.
    """
    return make_discrepancy(_kernel, first, second, hollow=True, paired=paired)(np.arange(len(first)))


def paired_kid(first: Features, second: Features, clusters: list[str]) -> Score:
    """Return 1000 x `kid` of paired sets [n, D] with the interval of a jackknife on both sides."""
    distance = make_discrepancy(_kernel, first, second, hollow=True, paired=True)
    return replace(jackknife_score(lambda kept: REPORTED * distance(kept), clusters), bias=None)


def draw_subsets(count: int, subsets: int, size: int, seed: int = SEED) -> NDArray[np.int64]:
    """Positions [subsets, size], each subset drawn without replacement."""
    rng = np.random.default_rng(seed)
    return np.stack([rng.choice(count, size, replace=False) for _ in range(subsets)])


def _kernel(a: Tensor, b: Tensor) -> Tensor:
    return (a @ b.T / a.shape[1] + 1) ** 3
