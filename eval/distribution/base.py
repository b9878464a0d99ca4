"""Base classes of metrics that compare two distributions of features."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from kvbench.core.files import resolve_path
from kvbench.eval.distribution.dataset import REFERENCE_BATCH, read_features
from kvbench.eval.distribution.frechet import Features, Positions
from kvbench.eval.files.images import ImageSet
from kvbench.eval.files.store import StoredFeatures
from kvbench.eval.files.weights import Weight
from kvbench.eval.protocol.base import Result
from kvbench.eval.protocol.scores import MetricSpec, Score, jackknife_score
from kvbench.eval.spaces.evaluator import SpaceEvaluator, describe_few_samples, finish, require_samples

PICTURES = Weight("a folder of real images", how="Name it, or ADM's reference batch (.npz), with statistics=")


@dataclass(frozen=True)
class Comparison(SpaceEvaluator):
    """Base class of distances between two sets of features; a subclass implements `make_distance` or `compare`.

    Attributes:
        spec: specification of the distance.
    """

    spec: ClassVar[MetricSpec] = MetricSpec("lower")

    @property
    def stem(self) -> str:
        """First part of the metric's name, before the name of the space."""
        return self.name.removesuffix("_real")

    @property
    def metric(self) -> str:
        """Name of the metric: `stem`, then the space's suffix for a reference run or for a dataset."""
        return f"{self.stem}_{self.space.paired if self.needs_reference else self.space.real}"

    @property
    def required(self) -> tuple[int, str]:
        """Minimum number of samples, and the reason for it."""
        return 2, "a distance between distributions"

    def make_distance(self, ours: Features, others: Any) -> Callable[[Positions], float]:
        """Return a function from the positions of kept samples to the distance; arguments as in `compare`."""
        raise NotImplementedError

    def compare(self, ours: Features, others: Any, clusters: list[str]) -> Sequence[Score]:
        """Return the scores of a run, in the order of `metrics`, by default the distance with a jackknife interval.

        Args:
            ours: features float32 [n, D] of the run.
            others: features float32 [m, D] of the reference run or of the dataset; `FidReal` takes their moments.
            clusters: prompt of each sample of the run.
        """
        return [jackknife_score(self.make_distance(ours, others), clusters)]

    def caveat(self, ours: Features) -> str | None:
        """Return a remark about scores of a run with these features, or None."""
        return None

    def score(self, samples: ImageSet, sides: Mapping[str, StoredFeatures], others: Any) -> Result:
        """Return the result for the run's features, `sides["images"]`, and `others`."""
        ours = sides["images"].arrays["features"]
        scores = self.compare(ours, others, samples.clusters)
        return finish(self, dict(zip(self.metrics, scores, strict=True)), sides, caveat=self.caveat(ours))


@dataclass(frozen=True)
class ToReference(Comparison):
    """Base class of distances to the reference run; the jackknife leaves out the same samples on both sides."""

    needs_reference: ClassVar[bool] = True

    def run(self, samples: ImageSet, reference: ImageSet | None, device: str) -> Result:
        """Return the metrics of the features of both sides."""
        assert reference is not None
        require_samples(len(samples), *self.required)
        ours, theirs = self.space.pair(samples, reference, device)
        return self.score(samples, {"images": ours, "reference": theirs}, theirs.arrays["features"])


@dataclass(frozen=True)
class ToDataset(Comparison):
    """Base class of distances to real images; the jackknife leaves out samples of the run.

    Attributes:
        statistics: a folder of images, a file written by `kvbench.eval.distribution.dataset`, or the reference batch
            (.npz) of ADM's evaluator for its spaces. By default the batch, or statistics-<space>.safetensors for other
            spaces, is searched among the weights.
    """

    statistics: str | None = None

    @property
    def weights(self) -> tuple[Weight, ...]:
        """File of the network, and of the dataset unless it is a folder."""
        if self.statistics is None:
            return (self.space.weight, self.default)
        if resolve_path(self.statistics).is_dir():
            return (self.space.weight,)
        how = "statistics= must name a folder of images, a .safetensors made from one, or ADM's .npz"
        return (self.space.weight, Weight(Path(self.statistics).name, how=how, path=self.statistics))

    @property
    def default(self) -> Weight:
        """File of the dataset if `statistics` is null; without ADM's batch, a missing file with a remedy."""
        return REFERENCE_BATCH if self.space.reference_names else PICTURES

    def caveat(self, ours: Features) -> str | None:
        """Return a warning about few samples in the spaces of published scores, else None."""
        return describe_few_samples(len(ours)) if self.space.reference_names else None

    def list_references(self, run: Path) -> Mapping[str, Path | None]:
        """Return the file or folder of the dataset by name, for the digest of inputs."""
        if self.statistics is not None:
            return {"statistics": resolve_path(self.statistics)}
        return {"statistics": self.default.find()}

    def dataset(self) -> Path:
        """Return the path of the dataset's file or folder."""
        if len(self.weights) > 1:
            return self.weights[1].require()[0]
        assert self.statistics is not None
        return resolve_path(self.statistics)

    def read_dataset(self, device: str) -> tuple[Any, dict[str, object]]:
        """Return the features float32 [m, D] of the dataset, and their origin."""
        real, origin = read_features(self.dataset(), self.space, device)
        return real.arrays["features"], origin

    def run(self, samples: ImageSet, reference: ImageSet | None, device: str) -> Result:
        """Return the metrics of the run's features against the dataset's."""
        require_samples(len(samples), *self.required)
        real, origin = self.read_dataset(device)
        ours = self.space.features(samples, device)
        result = self.score(samples, {"images": ours}, real)
        result.provenance["dataset"] = origin
        return result
