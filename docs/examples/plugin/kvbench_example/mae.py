"""Mean absolute error against the reference."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvbench.eval.files.images import ImageSet
from kvbench.eval.files.weights import Weight
from kvbench.eval.protocol.base import Result, make_result
from kvbench.eval.protocol.scores import MetricSpec, mean_score


@dataclass(frozen=True)
class Mae:
    """`mae`: absolute difference of 8-bit RGB values, mean over an image, then over images; 0 if they are identical."""

    name: ClassVar[str] = "mae"
    protocol: ClassVar[str] = "uint8"
    needs_reference: ClassVar[bool] = True
    packages: ClassVar[tuple[str, ...]] = ()
    metrics: ClassVar[Mapping[str, MetricSpec]] = {"mae": MetricSpec("lower", "levels", digits=3)}
    weights: ClassVar[tuple[Weight, ...]] = ()

    def run(self, images: ImageSet, reference: ImageSet | None, device: str) -> Result:
        """Score each image on the CPU, whatever the device."""
        assert reference is not None
        errors = []
        for [index] in images.batches(1, self.name):
            ours, theirs = images.image(index).astype(np.int16), reference.image(index).astype(np.int16)
            errors.append(float(np.abs(ours - theirs).mean()))
        scores = {"mae": mean_score(errors, images.clusters)}
        return make_result(self, scores, {"index": images.indices, "mae": errors})
