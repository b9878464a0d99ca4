"""Monge Inception Distance (Berthet et al., arXiv:2605.06797): a sliced Wasserstein distance of features, float64."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from torch import Tensor

from kvbench.core.config import Range
from kvbench.eval.distribution.base import Comparison, ToDataset, ToReference
from kvbench.eval.distribution.frechet import Features, Positions, check_features
from kvbench.eval.protocol.intervals import SEED
from kvbench.eval.protocol.scores import MetricSpec

PROJECTIONS = 1000
"""Number of directions in published implementations; the paper's choice for its tables is not known."""
SCALE = 3
"""Factor per dimension, as in torch-fidelity, which brings the distance to the magnitude of a FID."""


@dataclass(frozen=True)
class Sliced(Comparison):
    """Base class of MIND.

    Attributes:
        projections: number of directions, which are the same for all runs.
    """

    projections: Annotated[int, Range(1)] = PROJECTIONS

    def make_distance(self, ours: Features, others: Features) -> Callable[[Positions], float]:
        """Return a function from the positions of kept samples to the distance between both sides."""
        return make_sliced_distance(ours, others, self.projections, paired=self.needs_reference)


@dataclass(frozen=True)
class Mind(Sliced, ToReference):
    """`mind_paired_clean`, `mind_scenes`: MIND of run and reference run, small because both have the same seeds."""

    name: ClassVar[str] = "mind"


@dataclass(frozen=True)
class MindReal(Sliced, ToDataset):
    """`mind_real_clean`: MIND between the run's images and as many real images, sampled with a fixed seed.

    The paper compares sets of equal size. If there are fewer real images, all of them are used.
    """

    name: ClassVar[str] = "mind_real"
    spec: ClassVar[MetricSpec] = MetricSpec("lower", digits=2)

    def make_distance(self, ours: Features, others: Features) -> Callable[[Positions], float]:
        """Return a function from the positions of kept samples to their distance to as many real images as `ours`."""
        drawn = np.random.default_rng(SEED).permutation(len(others))[: len(ours)]
        return super().make_distance(ours, others[drawn])


def make_sliced_distance(
    first: Features, second: Features, projections: int, *, paired: bool
) -> Callable[[Positions], float]:
    """Return a function from the positions of kept samples to MIND; projections are sorted once.

    MIND is 3 D x the mean over directions of W2^2 between the projections of both sides. W2 is the Wasserstein distance
    of order 2 between two sets of scalars. Directions are uniform on the sphere.

    Args:
        first: [n, D]; the positions refer to its rows.
        second: [m, D].
        projections: number of directions.
        paired: row i of both sides is the same sample, which is left out on both.

    Raises:
        ValueError: fewer than two samples, unequal dimensions, non-finite features, or paired sets of unequal size.
    """
    a, b = check_features(first, second, paired=paired)
    directions = draw_directions(projections, a.shape[1])
    ours, theirs = ((directions @ side.T).sort(1) for side in (a, b))

    def find_distance(positions: Positions) -> float:
        kept = _keep(*ours, positions), _keep(*theirs, positions) if paired else theirs[0]
        return SCALE * a.shape[1] * float(_square_distances(*kept).mean())

    return find_distance


def draw_directions(count: int, dimensions: int) -> Tensor:
    """Sample unit vectors float64 [count, dimensions], uniform on the sphere, with a fixed seed."""
    drawn = torch.from_numpy(np.random.default_rng(SEED).normal(size=(count, dimensions)))
    return drawn / drawn.norm(dim=1, keepdim=True)


def _keep(values: Tensor, order: Tensor, positions: Positions) -> Tensor:
    """Keep the sorted values [directions, n] whose positions `order` are in `positions`: [directions, kept]."""
    kept = torch.zeros(order.shape[1], dtype=torch.bool)
    kept[positions] = True
    return values[kept[order]].view(len(values), -1)


def _square_distances(a: Tensor, b: Tensor) -> Tensor:
    """Return W2^2 [directions] of sorted values [directions, n] and [directions, m].

    Both quantile functions are steps; the integral of their squared difference is a sum over the steps of both.
    """
    n, m = a.shape[1], b.shape[1]
    ends = torch.cat([m * torch.arange(1, n + 1), n * torch.arange(1, m + 1)]).unique()
    widths = ends.diff(prepend=ends.new_zeros(1)).double() / (n * m)
    return (a[:, (ends - 1) // m] - b[:, (ends - 1) // n]).square() @ widths
