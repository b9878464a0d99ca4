"""DreamSim (Fu et al., arXiv:2306.09344), a distance between pairs of images in the space of its embeddings."""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from kvbench.eval.files.images import ImageSet
from kvbench.eval.protocol.base import Result
from kvbench.eval.protocol.scores import MetricSpec, mean_score
from kvbench.eval.spaces.base import Space
from kvbench.eval.spaces.dreamsim import DreamSimEmbeddings
from kvbench.eval.spaces.evaluator import SpaceEvaluator, finish


@dataclass(frozen=True)
class DreamSim(SpaceEvaluator):
    """`dreamsim[ensemble]`: 1 - cosine of the embeddings of an image and its reference, from 0 (identical) to 2.

    Fitted to human judgements of layout, pose and content, it complements LPIPS (textures) and feature distances
    (content). Embeddings are stored, so a reference is embedded once.
    """

    space: Space = field(default_factory=DreamSimEmbeddings)
    name: ClassVar[str] = "dreamsim"
    protocol: ClassVar[str] = "ensemble"
    needs_reference: ClassVar[bool] = True
    spec: ClassVar[MetricSpec] = MetricSpec("lower")

    def run(self, samples: ImageSet, reference: ImageSet | None, device: str) -> Result:
        """Return the distance 1 - cosine of each image to its reference image, and the mean over pairs."""
        assert reference is not None
        sides = dict(zip(("images", "reference"), self.space.pair(samples, reference, device), strict=True))
        first, second = (side.arrays["features"].astype(np.float64) for side in sides.values())
        # For unit vectors half the squared distance is 1 - cosine, and exactly 0 for equal vectors.
        values = (np.square(first - second).sum(1) / 2).tolist()
        columns = {"index": samples.indices, self.metric: values}
        return finish(self, {self.metric: mean_score(values, samples.clusters)}, sides, columns)
