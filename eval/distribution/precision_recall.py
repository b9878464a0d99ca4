"""Precision and recall of distributions by nearest neighbours (Kynkaanniemi et al., arXiv:1904.06991), in float64."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvbench.core.config import Range
from kvbench.eval.distribution.base import Comparison, ToDataset, ToReference
from kvbench.eval.distribution.frechet import Features, check_features
from kvbench.eval.protocol.intervals import Replicates, are_classes, assign_groups, wilson_interval
from kvbench.eval.protocol.scores import MetricSpec, Score, with_interval

NEIGHBOUR = 3  # k in the paper's experiments
SHARE_SPEC = MetricSpec("higher", digits=3)
CHUNK_ROWS = 512  # rows of a distance matrix computed at once
ROUNDING_ERROR = 1e-12  # rounding error of a squared distance, relative to the squared lengths

Groups = NDArray[np.int64]


@dataclass(frozen=True)
class ManifoldShares(Comparison):
    """Base class of precision and recall.

    `precision` is the share of the run's images inside the manifold of the other side, `recall` the share of the other
    side's images inside the manifold of the run.

    Attributes:
        neighbour: k, the rank of the neighbour whose distance is a ball's radius, see `leave_groups_out`.
    """

    neighbour: Annotated[int, Range(1)] = NEIGHBOUR

    @property
    def required(self) -> tuple[int, str]:
        """Minimum number of samples: a sample and its k neighbours."""
        return self.neighbour + 1, f"the distance to neighbour {self.neighbour}"

    @property
    def suffix(self) -> str:
        """Suffix of the metrics' names, the name of the space."""
        return f"_{self.space.paired}"

    @property
    def metrics(self) -> Mapping[str, MetricSpec]:
        """Specifications of precision and recall."""
        return {f"{name}{self.suffix}": SHARE_SPEC for name in ("precision", "recall")}

    def compare(self, ours: Features, others: Features, clusters: list[str]) -> Sequence[Score]:
        """Return precision and recall; the jackknife leaves out paired samples on both sides."""
        dealt = assign_groups(clusters)
        # There are no replicates if too few neighbours remain without a group.
        groups = dealt if len(dealt) - np.bincount(dealt).max() > self.neighbour else None
        sides = (groups, groups if self.needs_reference else None)
        pair = leave_groups_out(ours, others, self.neighbour, sides)
        return [_make_score(shares, clusters) for shares in pair]


@dataclass(frozen=True)
class PrecisionRecall(ManifoldShares, ToReference):
    """`precision_<space>` and `recall_<space>` of a run against its reference run."""

    name: ClassVar[str] = "precision_recall"


@dataclass(frozen=True)
class PrecisionRecallReal(ManifoldShares, ToDataset):
    """`precision` and `recall` against the images of the reference batch, as in ADM's evaluator."""

    name: ClassVar[str] = "precision_recall_real"

    @property
    def suffix(self) -> str:
        """Empty in the space `adm`, else the name of the space."""
        return "" if self.space.name == "adm" else f"_{self.space.real}"


def leave_groups_out(
    sample: Features, real: Features, neighbour: int, dealt: tuple[Groups | None, Groups | None]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the share of samples [n, D] inside the manifold of real features [m, D], and the converse.

    The manifold of a set is the union of balls around its points. The radius is the distance to the k-th nearest
    neighbour, without the point itself; the surface belongs to the ball.

    Args:
        sample: features of the run.
        real: features of the other side.
        neighbour: the rank k.
        dealt: group of each row of both sides, each int64 [n] or [m]; None keeps all rows of the side.

    Returns:
        Two arrays float64 [1 + groups]: with all samples, and without each group.

    Raises:
        ValueError: at most k samples, unequal dimensions, or non-finite features.
    """
    a, b = check_features(sample, real, min_samples=neighbour + 1)
    groups_a, groups_b = (None if g is None else torch.from_numpy(g) for g in dealt)
    precision = _covered(a, b, neighbour, groups_a, groups_b)
    return precision.numpy(), _covered(b, a, neighbour, groups_b, groups_a).numpy()


def _make_score(shares: NDArray[np.float64], clusters: Sequence[str]) -> Score:
    """Return the score of shares [1 + groups]; a share that no group changes has Wilson's interval for the prompts."""
    score = Score(float(shares[0]), len(clusters))
    if len(shares) == 1:
        return score
    replicates = Replicates.from_groups(shares[1:], clusters)
    interval = replicates.surround(float(shares[0]))
    if interval.se > 0:
        return with_interval(score, interval.clip(0, 1))
    count = len(clusters) if are_classes(clusters) else len(set(clusters))
    return with_interval(score, replace(wilson_interval(float(shares[0]), count), replicates=replicates))


def _covered(
    points: Tensor, centres: Tensor, neighbour: int, out_points: Tensor | None, out_centres: Tensor | None
) -> Tensor:
    """Return the share of points inside any ball, with all samples and without each group: float64 [1 + groups]."""
    dealt = [g for g in (out_points, out_centres) if g is not None]
    groups = max((int(g.max()) + 1 for g in dealt), default=0)
    radii = _radii(centres, neighbour, out_centres, groups)
    inside = torch.zeros(groups + 1, dtype=torch.float64)
    for start in range(0, len(points), CHUNK_ROWS):
        squared = _squared_distances(points[start : start + CHUNK_ROWS], centres)
        for column in range(groups + 1):
            covered = (squared <= radii[:, column]).any(1)
            if column and out_points is not None:
                covered &= out_points[start : start + CHUNK_ROWS] != column - 1
            inside[column] += covered.sum()
    size = torch.full((groups + 1,), len(points), dtype=torch.float64)
    if out_points is not None:
        size[1:] -= torch.bincount(out_points, minlength=groups)
    return inside / size


def _radii(centres: Tensor, neighbour: int, out: Tensor | None, groups: int) -> Tensor:
    """Return the squared distance to the k-th neighbour, in total and without each group: float64 [m, 1 + groups].

    Left-out centres have radius -1. The k nearest neighbours in each group contain the k nearest over several groups.
    """
    members = (
        [torch.arange(len(centres))] if out is None else [torch.where(out == g)[0] for g in range(groups)]
    )
    radii = torch.full((len(centres), groups + 1), -1.0, dtype=torch.float64)
    for start in range(0, len(centres), CHUNK_ROWS):
        squared = _squared_distances(centres[start : start + CHUNK_ROWS], centres)
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
    """Return squared distances float64 [n, m]; rounding errors become zero, so equal points share their balls."""
    middle = b.mean(0)
    a, b = a - middle, b - middle
    lengths = a.square().sum(1)[:, None] + b.square().sum(1)
    squared = lengths - 2 * a @ b.T
    return squared.where(squared > ROUNDING_ERROR * lengths, 0)
