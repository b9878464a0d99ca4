"""FID on MJHQ-30K (Li et al., arXiv:2402.17245), on all images and by category."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from kvbench.eval.distribution.dataset import Pictures
from kvbench.eval.distribution.frechet import frechet_distance, frechet_to, moments
from kvbench.eval.files.images import ImageSet
from kvbench.eval.files.samples import SampleSetError
from kvbench.eval.files.weights import Weight
from kvbench.eval.protocol.base import Result, SkipEvaluation
from kvbench.eval.protocol.scores import MetricSpec, Score, jackknife_score
from kvbench.eval.spaces.evaluator import SpaceEvaluator, finish, require_samples

CATEGORIES = (
    *("animals", "art", "fashion", "food", "indoor"),
    *("landscape", "logo", "people", "plants", "vehicles"),
)
FOLDER = "mjhq30k_imgs"
REMEDY = (
    f"Get https://huggingface.co/datasets/playgroundai/MJHQ-30K/resolve/main/{FOLDER}.zip, unzip it, and put "
    f"{FOLDER} (a folder of images for each category) into $KVBENCH_WEIGHTS, or set eval.fid_mjhq.folder to it"
)


@dataclass(frozen=True)
class FidMjhq(SpaceEvaluator):
    """`fid_mjhq_clean`: Frechet distance of the run to the real images of its categories, and for each category.

    All real images of a category are used, so a run on part of the prompts has a smaller n than published scores.
    Distances of categories have no interval.

    Attributes:
        folder: a folder of real images for each category; by default `mjhq30k_imgs` is searched among the weights.
    """

    folder: str | None = None
    name: ClassVar[str] = "fid_mjhq"
    required_meta: ClassVar[str] = "category"
    meta_keys: ClassVar[tuple[str, ...]] = ("category",)
    spec: ClassVar[MetricSpec] = MetricSpec("lower", digits=2)
    part_names: ClassVar[tuple[str, ...]] = CATEGORIES

    @property
    def metric(self) -> str:
        """Name of the distance over all categories."""
        return f"{self.space.distance}_mjhq_{self.space.name}"

    @property
    def weights(self) -> tuple[Weight, ...]:
        """File of the network, followed by the folder of real images if that is missing."""
        real = Weight(FOLDER, how=REMEDY, path=self.folder)
        return (self.space.weight,) if self._find() else (self.space.weight, real)

    def list_references(self, run: Path) -> Mapping[str, Path | None]:
        """Return the folder of each category by name, for the digest of inputs."""
        root = self._find()
        return {f"folder/{kind}": None if root is None else root / kind for kind in CATEGORIES}

    def run(self, images: ImageSet, reference: ImageSet | None, device: str) -> Result:
        """Compare the run with the real images of its categories; the jackknife leaves out samples of the run."""
        require_samples(len(images), 2, "a distance between distributions")
        labels = [str(images.meta(index).get("category")) for index in images.indices]
        if unknown := set(labels) - set(CATEGORIES):
            raise SkipEvaluation(f"no MJHQ-30K category: {min(unknown)}; use prompts=mjhq30k")
        root = self._find()
        assert root is not None
        kinds = [category for category in CATEGORIES if category in labels]
        real = {kind: self.space.features(_open(root / kind), device).arrays["features"] for kind in kinds}
        ours = self.space.features(images, device)
        features, rows = ours.arrays["features"], np.array(labels)
        distance = frechet_to(*moments(np.concatenate([*real.values()])))
        scores = {
            self.metric: jackknife_score(lambda positions: distance(features[positions]), images.clusters)
        }
        for kind in kinds:
            members = features[rows == kind]
            if len(members) > 1:
                scores[f"{self.metric}/{kind}"] = Score(frechet_distance(members, real[kind]), len(members))
        count = sum(map(len, real.values()))
        caveat = f"{len(features)} samples against {count} real images" if len(features) != count else None
        return finish(self, scores, {"images": ours}, caveat=caveat)

    def _find(self) -> Path | None:
        """Return the folder of real images, or None if it is missing."""
        paths = Weight(FOLDER, path=self.folder).candidates
        return next((path for path in paths if path.is_dir()), None)


def _open(folder: Path) -> Pictures:
    if not folder.is_dir():
        raise SampleSetError(f"{folder} is missing. {REMEDY}")
    return Pictures(folder)
