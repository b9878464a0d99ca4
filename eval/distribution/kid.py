"""Kernel distance between sets of features (Binkowski et al., arXiv:1801.01401), in float64."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvbench.core.config import Range
from kvbench.eval.distribution.base import ToReference
from kvbench.eval.distribution.frechet import Features, Positions
from kvbench.eval.distribution.kernels import make_discrepancy
from kvbench.eval.protocol.intervals import SEED, Replicates
from kvbench.eval.protocol.scores import MetricSpec, Score, with_interval

REPORT_FACTOR = 1000  # papers report KID times 1000


@dataclass(frozen=True)
class Kid(ToReference):
    """`kid_paired_clean`, `kid_scenes`: squared maximum mean discrepancy to the reference run, times 1000.

    Both sides have the same seeds, so pairs of the same sample are excluded from the cross term too; they would make
    the estimate negative.

    Attributes:
        full_up_to: maximum number of samples that are compared at once; above it, the mean over subsets is used.
        subsets: number of subsets.
        size: number of samples in a subset.
    """

    full_up_to: int = 10_000
    subsets: Annotated[int, Range(2)] = 100
    size: Annotated[int, Range(2)] = 1000
    name: ClassVar[str] = "kid"
    spec: ClassVar[MetricSpec] = MetricSpec("lower", "1e-3", digits=2)

    def make_distance(self, ours: Features, others: Features) -> Callable[[Positions], float]:
        """Return a function from the positions of kept samples to 1000 x `kid` of paired sets [n, D]."""
        distance = make_discrepancy(_kernel, ours, others, hollow=True, paired=True)
        return lambda positions: REPORT_FACTOR * distance(positions)

    def compare(self, ours: Features, others: Features, clusters: list[str]) -> Sequence[Score]:
        """Return the distance between both sides, from subsets if there are more than `full_up_to` samples."""
        if len(ours) <= self.full_up_to:
            return [replace(score, bias=None) for score in super().compare(ours, others, clusters)]
        # Subsampling: the standard error is the spread of the subsets, scaled to all samples.
        size = min(self.size, len(ours))
        draws = draw_subsets(len(ours), self.subsets, size)
        values = REPORT_FACTOR * np.array([kid(ours[draw], others[draw], paired=True) for draw in draws])
        method = f"subsampling {self.subsets} of {size} seed {SEED}"
        replicates = Replicates(tuple(values.tolist()), (size / len(ours)) ** 0.5, method)
        value = float(values.mean())
        return [with_interval(Score(value, len(ours)), replicates.surround(value))]


def kid(first: Features, second: Features, *, paired: bool = False) -> float:
    """Return the unbiased MMD^2 of [n, D] and [m, D] with the kernel (x.y / D + 1)^3, see `make_discrepancy`."""
    return make_discrepancy(_kernel, first, second, hollow=True, paired=paired)(np.arange(len(first)))


def draw_subsets(count: int, subsets: int, size: int) -> NDArray[np.int64]:
    """Sample positions int64 [subsets, size] below `count`, without replacement in each subset."""
    rng = np.random.default_rng(SEED)
    return np.stack([rng.choice(count, size, replace=False) for _ in range(subsets)])


def _kernel(a: Tensor, b: Tensor) -> Tensor:
    return (a @ b.T / a.shape[1] + 1) ** 3
