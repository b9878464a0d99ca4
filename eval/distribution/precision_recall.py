"""Precision and recall of distributions by nearest neighbours (Kynkaanniemi et al., arXiv:1904.06991), in float64."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvbench.eval.distribution.base import ToDataset, ToReference
from kvbench.eval.distribution.frechet import Features, checked
from kvbench.eval.protocol.base import setting
from kvbench.eval.protocol.intervals import Interval, Replicates, are_classes, assign_groups
from kvbench.eval.protocol.scores import MetricSpec, Score, with_interval
from kvbench.eval.protocol.shares import wilson_interval
from kvbench.eval.spaces.base import few_samples

NEIGHBOUR = 3
SHARE = MetricSpec("higher", digits=3)
ROWS = 512  # of a distance matrix at a time
ROUNDING = 1e-12  # of a squared distance, relative to the squared lengths

Groups = NDArray[np.int64]


@dataclass(frozen=True)
class PrecisionRecall(ToReference):
    """Precision and recall of a run against its reference run.

    `precision_<space>` is the share of the run's images that lie within the k-th neighbour's distance of an
    image of the reference, `recall_<space>` the share of the reference's images that lie so near one of the run.

    Attributes:
        neighbour: k.
    """

    neighbour: int = setting(NEIGHBOUR, 1)
    name: ClassVar[str] = "precision_recall"

    @property
    def required(self) -> tuple[int, str]:
        """A sample and its neighbours."""
        return self.neighbour + 1, f"the distance to neighbour {self.neighbour}"

    @property
    def metrics(self) -> Mapping[str, MetricSpec]:
        """Both shares, named after the space."""
        return {f"{name}_{self.space.paired}": SHARE for name in ("precision", "recall")}

    def compare(self, ours: Features, others: Features, clusters: list[str]) -> dict[str, Score]:
        """Return both shares."""
        return _scores(list(self.metrics), ours, others, self.neighbour, clusters, paired=True)


@dataclass(frozen=True)
class PrecisionRecallReal(ToDataset):
    """`precision` and `recall` as the ADM evaluator has them: against the images of its reference batch.

    Attributes:
        neighbour: k.
    """

    neighbour: int = setting(NEIGHBOUR, 1)
    name: ClassVar[str] = "precision_recall_real"

    @property
    def required(self) -> tuple[int, str]:
        """A sample and its neighbours."""
        return self.neighbour + 1, f"the distance to neighbour {self.neighbour}"

    @property
    def metrics(self) -> Mapping[str, MetricSpec]:
        """Both shares; outside the space `adm` they are named after the space."""
        end = "" if self.space.name == "adm" else f"_{self.space.real}"
        return {f"{name}{end}": SHARE for name in ("precision", "recall")}

    def compare(self, ours: Features, others: Features, clusters: list[str]) -> dict[str, Score]:
        """Return both shares."""
        return _scores(list(self.metrics), ours, others, self.neighbour, clusters, paired=False)

    def caveat(self, ours: Features) -> str | None:
        """Return a warning if the samples are few."""
        return few_samples(len(ours))


def precision_recall(sample: Features, real: Features, neighbour: int = NEIGHBOUR) -> tuple[float, float]:
    """Share of samples inside the manifold of real features, and the other way round.

    The manifold of a set is the union of balls around its points, each as wide as the distance to its k-th
    nearest neighbour, the point itself not counted; a point on the surface is inside.

    Args:
        sample: [n, D].
        real: [m, D].
        neighbour: k.

    Raises:
        ValueError: no more than k samples, unequal dimensions, or features that are not finite.
    """
    a, b = checked(sample, real, min_samples=neighbour + 1)
    return float(_covered(a, b, neighbour, None, None)[0]), float(_covered(b, a, neighbour, None, None)[0])


def leave_groups_out(
    sample: Features, real: Features, neighbour: int, dealt: tuple[Groups | None, Groups | None]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """`precision_recall` of everything and without each group: two arrays float64 [1 + groups].

    Distances are computed once for all of them.

    Args:
        sample: [n, D].
        real: [m, D].
        neighbour: k.
        dealt: group of each row of either side; None keeps that side whole.
    """
    a, b = checked(sample, real, min_samples=neighbour + 1)
    groups_a, groups_b = (None if g is None else torch.from_numpy(g) for g in dealt)
    precision = _covered(a, b, neighbour, groups_a, groups_b)
    return precision.numpy(), _covered(b, a, neighbour, groups_b, groups_a).numpy()


def _scores(
    names: Sequence[str],
    sample: Features,
    real: Features,
    neighbour: int,
    clusters: Sequence[str],
    *,
    paired: bool,
) -> dict[str, Score]:
    """Return both shares; with `paired`, a group of samples is left out on both sides."""
    dealt = assign_groups(clusters)
    if len(dealt) - np.bincount(dealt).max() <= neighbour:  # what a group leaves has no such neighbour
        return {
            name: Score(value, len(sample))
            for name, value in zip(names, precision_recall(sample, real, neighbour), strict=True)
        }
    shares = leave_groups_out(sample, real, neighbour, (dealt, dealt if paired else None))
    return {
        name: with_interval(
            Score(float(found[0]), len(sample)),
            _surround(float(found[0]), Replicates.from_groups(found[1:], clusters), clusters),
        )
        for name, found in zip(names, shares, strict=True)
    }


def _surround(share: float, replicates: Replicates, clusters: Sequence[str]) -> Interval:
    """Return the interval of a share; one that no group moves is as uncertain as a share of so many prompts is."""
    found = replicates.surround(share)
    if found.se > 0:
        return found.clip(0, 1)
    count = len(clusters) if are_classes(clusters) else len(set(clusters))
    return replace(wilson_interval(share, count), replicates=replicates)


def _covered(
    points: Tensor, centres: Tensor, neighbour: int, out_points: Tensor | None, out_centres: Tensor | None
) -> Tensor:
    """Share of points in a ball around a centre, of all and without each group: float64 [1 + groups]."""
    dealt = [g for g in (out_points, out_centres) if g is not None]
    groups = max((int(g.max()) + 1 for g in dealt), default=0)
    radii = _radii(centres, neighbour, out_centres, groups)
    inside = torch.zeros(groups + 1, dtype=torch.float64)
    for start in range(0, len(points), ROWS):
        squared = _squared_distances(points[start : start + ROWS], centres)
        for column in range(groups + 1):
            found = (squared <= radii[:, column]).any(1)
            if column and out_points is not None:
                found &= out_points[start : start + ROWS] != column - 1
            inside[column] += found.sum()
    size = torch.full((groups + 1,), len(points), dtype=torch.float64)
    if out_points is not None:
        size[1:] -= torch.bincount(out_points, minlength=groups)
    return inside / size


def _radii(centres: Tensor, neighbour: int, out: Tensor | None, groups: int) -> Tensor:
    """Squared distance to the k-th neighbour, of all and without each group: float64 [m, 1 + groups].

    Centres that are left out have radius -1. The k nearest of each group are enough to know the k nearest of
    all the others.
    """
    members = (
        [torch.arange(len(centres))] if out is None else [torch.where(out == g)[0] for g in range(groups)]
    )
    radii = torch.full((len(centres), groups + 1), -1.0, dtype=torch.float64)
    for start in range(0, len(centres), ROWS):
        squared = _squared_distances(centres[start : start + ROWS], centres)
        rows = slice(start, start + len(squared))
        squared.diagonal(start).fill_(torch.inf)
        nearest = [squared[:, of].topk(min(neighbour, len(of)), largest=False).values for of in members]
        radii[rows] = torch.cat(nearest, 1).kthvalue(neighbour).values[:, None]
        if out is not None:
            for group in range(groups):
                others = torch.cat(nearest[:group] + nearest[group + 1 :], 1)
                radii[rows, group + 1] = others.kthvalue(neighbour).values
    if out is not None:
        radii[torch.arange(len(centres)), out + 1] = -1
    return radii


def _squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """[n, m], float64; what rounding alone may have left is zero, so that equal points lie in each other's balls."""
    middle = b.mean(0)
    a, b = a - middle, b - middle
    lengths = a.square().sum(1)[:, None] + b.square().sum(1)
    squared = lengths - 2 * a @ b.T
    return squared.where(squared > ROUNDING * lengths, 0)
