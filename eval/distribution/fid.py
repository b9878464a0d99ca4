"""Frechet distances: of a run to its reference run, and of a run to the statistics of a dataset.

The expected distance falls as samples are added, and the interval is about sets of equally many samples: it covers the
value that this number of samples has on average, and not that of infinitely many. `bias` of the score estimates what
lies between the two (Chong and Forsyth, arXiv:1911.07023, extrapolate it from subsets). Distances on unequal numbers
of samples do not compare.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from kvbench.eval.distribution.dataset import DatasetError, OnDataset, dataset_moments
from kvbench.eval.distribution.frechet import Features, frechet_distance, frechet_to
from kvbench.eval.files.images import ImageSet
from kvbench.eval.protocol.base import Result
from kvbench.eval.protocol.intervals import jackknife
from kvbench.eval.protocol.scores import MetricSpec, Score, with_interval
from kvbench.eval.spaces.base import InSpace, few_samples, finish, require_samples


@dataclass(frozen=True)
class Fid(InSpace):
    """`fid_paired_clean`, `fid_scenes`, `fd_paired_dinov2`: distance between the features of run and reference.

    The number is small because both sides share their seeds; it is not a FID against real images.
    """

    name: ClassVar[str] = "fid"
    needs_reference: ClassVar[bool] = True

    @property
    def metrics(self) -> Mapping[str, MetricSpec]:
        """One distance, named after the space."""
        return {f"{self.space.distance}_{self.space.paired}": MetricSpec("lower")}

    def run(self, images: ImageSet, reference: ImageSet | None, device: str) -> Result:
        """Features of both sides, then their distance; the jackknife leaves out the same samples on both."""
        assert reference is not None
        require_samples(len(images), 2, "a distance between distributions")
        ours, theirs = self.space.pair(images, reference, device)
        first, second = ours.arrays["features"], theirs.arrays["features"]
        [name] = self.metrics
        score = distance_score(first, second, images.clusters)
        return finish(self, {name: score}, {"images": ours, "reference": theirs}, _singular(first))


@dataclass(frozen=True)
class FidReal(OnDataset):
    """`fid_real_clean`, `fid_adm`, `fd_dinov2`: distance between the features of the run and those of a dataset."""

    name: ClassVar[str] = "fid_real"

    @property
    def metrics(self) -> Mapping[str, MetricSpec]:
        """One distance, named after the space."""
        return {f"{self.space.distance}_{self.space.real}": MetricSpec("lower", digits=2)}

    def run(self, images: ImageSet, reference: ImageSet | None, device: str) -> Result:
        """Features of the run, then their distance to the dataset; the jackknife leaves out samples of the run."""
        require_samples(len(images), 2, "a distance between distributions")
        path = self.dataset()
        real = dataset_moments(path, self.space, device)
        ours = self.space.features(images, device)
        features = ours.arrays["features"]
        if features.shape[1] != len(real.mean):
            raise DatasetError(f"{path}: {len(real.mean)} features, the network gives {features.shape[1]}")
        distance = frechet_to(real.mean, real.covariance)
        value = distance(features)
        interval = jackknife(lambda kept: distance(features[kept]), value, images.clusters)
        [name] = self.metrics
        score = with_interval(Score(value, len(features)), interval)
        caveat = few_samples(len(features)) if self.space.name == "adm" else None
        result = finish(self, {name: score}, {"images": ours}, _singular(features) or caveat)
        result.provenance["dataset"] = real.origin
        return result


def distance_score(first: Features, second: Features, clusters: list[str]) -> Score:
    """Return the Frechet distance of paired features [n, D] with interval and bias.

    The jackknife behind both leaves out the same samples on both sides. The interval is about sets of n samples.
    """
    value = frechet_distance(first, second)
    interval = jackknife(lambda kept: frechet_distance(first[kept], second[kept]), value, clusters)
    return with_interval(Score(value, len(first)), interval)


def _singular(features: Features) -> str | None:
    count, dimensions = features.shape
    if count > dimensions:
        return None
    return (
        f"{count} samples for {dimensions} features: the covariance is singular and the value biased upward"
    )
