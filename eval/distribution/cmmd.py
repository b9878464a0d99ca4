"""CMMD: maximum mean discrepancy of CLIP image vectors (Jayasumana et al., arXiv:2401.09603), in float64."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.eval.distribution.base import Comparison, ToDataset, ToReference
from kvbench.eval.distribution.frechet import Features
from kvbench.eval.distribution.kernels import make_discrepancy
from kvbench.eval.files.weights import Weight
from kvbench.eval.protocol.scores import MetricSpec, Score, jackknife_score
from kvbench.eval.spaces.base import Space
from kvbench.eval.spaces.clip import ClipImages

SIGMA = 10.0
"""Width of the Gaussian kernel."""
REPORT_FACTOR = 1000
"""Factor of reported values in the paper."""
SPEC = MetricSpec("lower", "1e-3", digits=3)
PICTURES = Weight("a folder of real images", how="Name it, or ADM's reference batch (.npz), with statistics=")


@dataclass(frozen=True)
class Discrepancy(Comparison):
    """Base class of CMMD: biased estimate with a Gaussian kernel on unit vectors, as in the authors' program."""

    space: Space = field(default_factory=ClipImages)

    def compare(self, ours: Features, others: Features, clusters: list[str]) -> Sequence[Score]:
        """Return the discrepancy between both sides."""
        return [discrepancy_score(ours, others, clusters, paired=self.needs_reference)]


@dataclass(frozen=True)
class Cmmd(Discrepancy, ToReference):
    """`cmmd_paired`: CMMD of the run to its reference run, times 1000."""

    name: ClassVar[str] = "cmmd"
    metrics: ClassVar[Mapping[str, MetricSpec]] = {"cmmd_paired": SPEC}


@dataclass(frozen=True)
class CmmdReal(Discrepancy, ToDataset):
    """`cmmd`: CMMD of the run to real images, times 1000; `statistics` is required and must hold images."""

    name: ClassVar[str] = "cmmd_real"
    metrics: ClassVar[Mapping[str, MetricSpec]] = {"cmmd": SPEC}

    @property
    def default(self) -> Weight:
        """Missing file with the remedy: moments of a dataset do not suffice."""
        return PICTURES


def discrepancy_score(first: Features, second: Features, clusters: Sequence[str], *, paired: bool) -> Score:
    """Return 1000 x the biased MMD^2 of unit vectors [n, D] and [m, D] with its jackknife interval.

    `clusters` has the prompt of each row of `first`. With `paired` the jackknife leaves out rows on both sides.
    """
    distance = make_discrepancy(_gaussian, first, second, hollow=False, paired=paired)
    return jackknife_score(lambda positions: REPORT_FACTOR * distance(positions), clusters)


def _gaussian(a: Tensor, b: Tensor) -> Tensor:
    squared = a.square().sum(1)[:, None] + b.square().sum(1) - 2 * a @ b.T
    return torch.exp(-squared / (2 * SIGMA**2))
