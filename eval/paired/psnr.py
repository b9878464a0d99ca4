"""PSNR: peak signal-to-noise ratio of 8-bit images."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kvbench.eval.files.images import ImageSet
from kvbench.eval.protocol.base import Evaluator, Result, make_result
from kvbench.eval.protocol.intervals import bootstrap, leave_out
from kvbench.eval.protocol.scores import MetricSpec, Score, mean_score, with_interval

PEAK_VALUE = 255  # of 8-bit pixels
BATCH_SIZE = 16
"""Number of pairs of images that are decoded together."""


@dataclass(frozen=True)
class Psnr(Evaluator):
    """`psnr`: peak signal-to-noise ratio of 8-bit RGB, from exact integer squared errors.

    `psnr` is the arithmetic mean of the decibels of each image, as in papers. Identical images have infinite values;
    they are counted in `n_identical` and excluded from the mean and its `n`. If there are any, compare `psnr_mean_mse`,
    the decibels of the mean squared error over all images, which then comes first.
    """

    name: ClassVar[str] = "psnr"
    protocol: ClassVar[str] = "uint8"
    needs_reference: ClassVar[bool] = True
    meta_keys: ClassVar[tuple[str, ...]] = ()
    metrics: ClassVar[Mapping[str, MetricSpec]] = {
        "psnr": MetricSpec("higher", "dB", digits=2),
        "psnr_mean_mse": MetricSpec("higher", "dB", digits=2),
        "n_identical": MetricSpec("higher", "images", digits=0, detail=True),
    }

    def run(self, images: ImageSet, reference: ImageSet | None, device: str) -> Result:
        """Measure squared error, mean squared error and decibels of each image; device is not used."""
        assert reference is not None
        errors: list[int] = []
        sizes: list[int] = []
        for batch in images.batches(BATCH_SIZE, self.name):
            for ours, theirs in zip(images.stack(batch), reference.stack(batch), strict=True):
                errors.append(squared_error(ours, theirs))
                sizes.append(ours.size)
        means = np.array(errors) / np.array(sizes)
        per_image = decibels(means)
        finite = np.isfinite(per_image)
        prompts = images.clusters
        scores = {"psnr": Score(None), "psnr_mean_mse": Score(None, len(images))}
        if finite.any():
            used = [prompt for prompt, use in zip(prompts, finite, strict=True) if use]
            scores["psnr"] = mean_score(per_image[finite].tolist(), used)
            scores["psnr_mean_mse"] = _score_mean_error(means, prompts)
        samples = {"index": images.indices, "sse": errors, "mse": means.tolist(), "psnr": per_image.tolist()}
        identical, caveat = int((~finite).sum()), None
        if identical:
            caveat = (
                f"{identical} of {len(images)} images are identical and not in psnr: compare psnr_mean_mse"
                if identical < len(images)
                else "all images are identical to the reference"
            )
            scores = {name: scores[name] for name in ("psnr_mean_mse", "psnr")}
        scores["n_identical"] = Score(float(identical), len(images))
        return make_result(self, scores, samples, caveat=caveat)


def _score_mean_error(means: NDArray[np.float64], prompts: list[str]) -> Score:
    """Return the decibels of the mean of squared errors float64 [samples], which are not all zero."""
    score = with_interval(
        Score(float(decibels(means.mean())), len(means)), bootstrap(means.tolist(), prompts, decibels)
    )
    return replace(
        score, replicates=leave_out(lambda positions: float(decibels(means[positions].mean())), prompts)
    )


def squared_error(ours: NDArray[np.uint8], theirs: NDArray[np.uint8]) -> int:
    """Return the exact sum of squared differences of two images of one shape."""
    return int(np.square(ours.astype(np.int64) - theirs).sum())


def decibels(mean_squared_error: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return 10 log10(255^2 / mse) in dB, of the shape of `mean_squared_error`; infinite for an error of zero."""
    with np.errstate(divide="ignore"):
        return 10 * np.log10(PEAK_VALUE**2 / mean_squared_error)
