"""CMMD: maximum mean discrepancy of CLIP image vectors (Jayasumana et al., arXiv:2401.09603), in float64."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.eval.distribution.base import Comparison, ToDataset, ToReference
from kvbench.eval.distribution.frechet import Features, Positions
from kvbench.eval.distribution.kernels import make_discrepancy
from kvbench.eval.protocol.scores import MetricSpec
from kvbench.eval.spaces.base import Space
from kvbench.eval.spaces.clip import ClipImages

SIGMA = 10.0
"""Width sigma of the Gaussian kernel."""
REPORT_FACTOR = 1000
"""Factor by which the paper multiplies reported values."""


@dataclass(frozen=True)
class Discrepancy(Comparison):
    """Base class of CMMD: biased estimate with a Gaussian kernel on unit vectors, as in the official code."""

    space: Space = field(default_factory=ClipImages)
    spec: ClassVar[MetricSpec] = MetricSpec("lower", "1e-3", digits=3)

    def make_distance(self, ours: Features, others: Features) -> Callable[[Positions], float]:
        """Return 1000 x the biased MMD^2 of unit vectors [n, D] and [m, D] by the positions of kept samples."""
        distance = make_discrepancy(_gaussian, ours, others, hollow=False, paired=self.needs_reference)
        return lambda positions: REPORT_FACTOR * distance(positions)


@dataclass(frozen=True)
class Cmmd(Discrepancy, ToReference):
    """`cmmd_paired`: CMMD of the run to its reference run, times 1000."""

    name: ClassVar[str] = "cmmd"
    metric: ClassVar[str] = "cmmd_paired"


@dataclass(frozen=True)
class CmmdReal(Discrepancy, ToDataset):
    """`cmmd`: CMMD of the run to real images, times 1000; `statistics` is required and must hold images."""

    name: ClassVar[str] = "cmmd_real"
    metric: ClassVar[str] = "cmmd"


def _gaussian(a: Tensor, b: Tensor) -> Tensor:
    squared = a.square().sum(1)[:, None] + b.square().sum(1) - 2 * a @ b.T
    return torch.exp(-squared / (2 * SIGMA**2))
