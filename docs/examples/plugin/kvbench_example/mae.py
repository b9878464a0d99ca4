"""Mean absolute error against the reference."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvbench.eval.files.images import ImageSet
from kvbench.eval.protocol.base import Evaluator, Result, make_result
from kvbench.eval.protocol.scores import MetricSpec, mean_score


@dataclass(frozen=True)
class Mae(Evaluator):
    """`mae`: absolute difference of 8-bit RGB values, mean over an image, then over images; 0 if they are identical."""

    name: ClassVar[str] = "mae"
    protocol: ClassVar[str] = "uint8"
    needs_reference: ClassVar[bool] = True
    meta_keys: ClassVar[tuple[str, ...]] = ()
    metrics: ClassVar[dict[str, MetricSpec]] = {"mae": MetricSpec("lower", "levels", digits=3)}

    def run(self, images: ImageSet, reference: ImageSet | None, device: str) -> Result:
        """Compute the error of each image, always on the CPU."""
        assert reference is not None
        errors = []
        for [index] in images.batches(1, self.name):
            ours, theirs = images.image(index).astype(np.int16), reference.image(index).astype(np.int16)
            errors.append(float(np.abs(ours - theirs).mean()))
        scores = {"mae": mean_score(errors, images.clusters)}
        return make_result(self, scores, {"index": images.indices, "mae": errors})
