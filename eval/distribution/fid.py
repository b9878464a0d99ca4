"""Frechet distances of a run to its reference run or to a dataset.

The expected distance falls with the number of samples n. The interval covers the expected value for n samples, not for
infinitely many; `bias` of the score estimates the difference (Chong and Forsyth, arXiv:1911.07023, extrapolate it from
subsets). Distances with different n are not comparable.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvbench.eval.distribution.base import Comparison, ToDataset, ToReference
from kvbench.eval.distribution.dataset import find_statistics, read_moments
from kvbench.eval.distribution.frechet import Features, Positions, frechet_distance, frechet_to
from kvbench.eval.files.samples import SampleSetError
from kvbench.eval.files.weights import Weight
from kvbench.eval.protocol.scores import MetricSpec


class Frechet(Comparison):
    """Base class of Frechet distances, whose name depends on the space."""

    @property
    def stem(self) -> str:
        """First part of the metric's name, `fid` or `fd`, by the space of features."""
        return self.space.distance

    def caveat(self, ours: Features) -> str | None:
        """Return a warning if n <= D makes the covariance singular, else the base class's caveat."""
        count, dimensions = ours.shape
        why = f"{count} samples for {dimensions} features: the covariance is singular and the value biased upward"
        return super().caveat(ours) if count > dimensions else why


@dataclass(frozen=True)
class Fid(Frechet, ToReference):
    """`fid_paired_clean`, `fid_scenes`, `sfid_paired_adm`, `fd_paired_dinov2`: distance of run and reference.

    The distance is small because both sides have the same seeds; it is not a FID against real images.
    """

    name: ClassVar[str] = "fid"

    def make_distance(self, ours: Features, others: Features) -> Callable[[Positions], float]:
        """Return a function from the positions of kept samples to the distance between both sides."""
        return lambda positions: frechet_distance(ours[positions], others[positions])


@dataclass(frozen=True)
class FidReal(Frechet, ToDataset):
    """`fid_real_clean`, `fid_adm`, `sfid_adm`, `fd_dinov2`: distance between the features of run and dataset."""

    name: ClassVar[str] = "fid_real"
    spec: ClassVar[MetricSpec] = MetricSpec("lower", digits=2)

    @property
    def default(self) -> Weight:
        """The reference batch for its spaces, else a file of statistics."""
        return super().default if self.space.reference_names else find_statistics(self.space.name)

    def read_dataset(self, device: str) -> tuple[tuple[Tensor, Tensor], dict[str, object]]:
        """Return the dataset's mean [D] and covariance [D, D], float64, and their origin."""
        mean, covariance, origin = read_moments(self.dataset(), self.space, device)
        return (mean, covariance), origin

    def make_distance(self, ours: Features, others: tuple[Tensor, Tensor]) -> Callable[[Positions], float]:
        """Return a function from the positions of kept samples to their distance to the dataset's moments.

        Raises:
            SampleSetError: the dataset has another number of features.
        """
        if ours.shape[1] != len(others[0]):
            sizes = f"{len(others[0])} features, the network gives {ours.shape[1]}"
            raise SampleSetError(f"{self.dataset()}: {sizes}")
        distance = frechet_to(*others)
        return lambda positions: distance(ours[positions])
