"""Fidelity to the reference image by image: PSNR, SSIM and LPIPS."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from kvbench.eval.files.images import ImageSet
from kvbench.eval.files.weights import TORCH_CACHES, Weight
from kvbench.eval.paired.base import Measure, PairedScore
from kvbench.eval.paired.structure import BORDER, crop_border, map_similarity, to_planes
from kvbench.eval.protocol.base import Evaluator, Result, make_result
from kvbench.eval.protocol.intervals import bootstrap, leave_out
from kvbench.eval.protocol.scores import MetricSpec, Score, mean_score, with_interval
from kvbench.eval.spaces.scenes import to_unit

PEAK = 255
AT_ONCE = 16
"""Pairs of images that are decoded together."""

ALEXNET = Weight.at(
    "https://download.pytorch.org/models/alexnet-owt-7be5be79.pth",
    "7be5be791159472b1fbf3c69796f7cb30dca7ad8466c2df70058c37116cdee02",
    size=244_408_911,
    places=TORCH_CACHES,
)


@dataclass(frozen=True)
class Psnr(Evaluator):
    """`psnr`: peak signal-to-noise ratio of 8-bit RGB, from exact integer squared errors.

    As in the papers: decibels per image, then their arithmetic mean. Identical images are infinitely good; they are
    counted in `n_identical` and left out of that mean, whose `n` is what remains. Once there are any, `psnr` says how
    far the others are, and `psnr_mean_mse` (the ratio of the mean squared error over all images) is the figure to
    compare: it then comes first.
    """

    name: ClassVar[str] = "psnr"
    protocol: ClassVar[str] = "uint8"
    needs_reference: ClassVar[bool] = True
    metrics: ClassVar[Mapping[str, MetricSpec]] = {
        "psnr": MetricSpec("higher", "dB", digits=2),
        "psnr_mean_mse": MetricSpec("higher", "dB", digits=2),
        "n_identical": MetricSpec("higher", "images", digits=0, detail=True),
    }

    def run(self, images: ImageSet, reference: ImageSet | None, device: str) -> Result:
        """Squared error, mean squared error and decibels of each image; device is not used."""
        assert reference is not None
        errors: list[int] = []
        sizes: list[int] = []
        for batch in images.batches(AT_ONCE, self.name):
            for ours, theirs in zip(images.stack(batch), reference.stack(batch), strict=True):
                errors.append(squared_error(ours, theirs))
                sizes.append(ours.size)
        means = np.array(errors) / np.array(sizes)
        per_image = decibels(means)
        finite = np.isfinite(per_image)
        prompts = images.clusters
        scores = {"psnr": Score(None), "psnr_mean_mse": Score(None, len(images))}
        if finite.any():
            kept = [prompt for prompt, use in zip(prompts, finite, strict=True) if use]
            scores["psnr"] = mean_score(per_image[finite].tolist(), kept)
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
    """Return the ratio in dB of the mean of squared errors float64 [samples], not all of them zero."""
    score = with_interval(
        Score(float(decibels(means.mean())), len(means)), bootstrap(means.tolist(), prompts, decibels)
    )
    return replace(score, replicates=leave_out(lambda kept: float(decibels(means[kept].mean())), prompts))


@dataclass(frozen=True)
class Ssim(PairedScore):
    """`ssim`: structural similarity (Wang et al., 2004).

    Gaussian window of 11 x 11 with sigma 1.5, K = (0.01, 0.03), data range of 8 bits, per channel, then the
    mean. `ssim` averages the valid region, as Wang does: the 5-pixel border, where the window meets padding,
    is left out. `ssim_tm` averages everything, which is what torchmetrics returns by default.

    Attributes:
        double: compute in float64, 15 times slower on a CPU; float32 is off by up to 4e-5 in flat regions.
    """

    double: bool = False
    name: ClassVar[str] = "ssim"
    protocol: ClassVar[str] = "gaussian11"
    metrics: ClassVar[Mapping[str, MetricSpec]] = {
        "ssim": MetricSpec("higher"),
        "ssim_tm": MetricSpec("higher", detail=True),
    }

    def load(self, device: str) -> tuple[Measure, Mapping[str, str]]:
        """Return a function that averages the similarity map of each pair twice; it needs no files."""

        def measure(ours: NDArray[np.uint8], theirs: NDArray[np.uint8]) -> list[torch.Tensor]:
            similarity = ssim_map(ours, theirs, device, double=self.double)
            return [part.mean((1, 2, 3)) for part in (crop_border(similarity), similarity)]

        return measure, {}


@dataclass(frozen=True)
class Lpips(PairedScore):
    """`lpips`: learned perceptual distance (Zhang et al., arXiv:1801.03924), version 0.1 on AlexNet.

    Attributes:
        trunk: the AlexNet file; its hash is checked before it is read. The heads come with the package.
        path: where it lies, if neither in $KVBENCH_WEIGHTS nor in torch's cache.
    """

    path: str | None = None
    trunk: Weight = ALEXNET
    name: ClassVar[str] = "lpips"
    protocol: ClassVar[str] = "alex"
    packages: ClassVar[tuple[str, ...]] = ("lpips", "torchvision")
    metrics: ClassVar[Mapping[str, MetricSpec]] = {"lpips": MetricSpec("lower")}

    def load(self, device: str) -> tuple[Measure, Mapping[str, str]]:
        """Read the network."""
        file, sha256 = replace(self.trunk, path=self.path).require()
        network = alex(file).to(device)
        unit = partial(to_unit, device=device)
        return lambda a, b: [network(unit(a), unit(b), normalize=True).flatten()], {file.name: sha256}


def squared_error(ours: NDArray[np.uint8], theirs: NDArray[np.uint8]) -> int:
    """Exact sum of squared differences of 8-bit pixels."""
    return int(np.square(ours.astype(np.int64) - theirs).sum())


def decibels(mean_squared_error: NDArray[np.float64]) -> NDArray[np.float64]:
    """10 log10(255^2 / mse); infinite where the error is zero."""
    with np.errstate(divide="ignore"):
        return 10 * np.log10(PEAK**2 / mean_squared_error)


def ssim_map(
    ours: NDArray[np.uint8], theirs: NDArray[np.uint8], device: str, *, double: bool
) -> torch.Tensor:
    """Return the similarity [N, 3, H, W] of uint8 [N, H, W, 3] images at every position, padded by reflection.

    Raises:
        ValueError: the images are smaller than the window.
    """
    if min(ours.shape[1:3]) <= 2 * BORDER:
        raise ValueError(
            f"ssim needs images larger than {2 * BORDER} pixels, got {ours.shape[2]}x{ours.shape[1]}"
        )
    return map_similarity(*(to_planes(side, device, double=double) for side in (ours, theirs)))[0]


def alex(file: Path) -> torch.nn.Module:
    """LPIPS network with the trunk read from a local AlexNet state dict; nothing is downloaded."""
    from lpips import LPIPS  # imports torchvision

    network: torch.nn.Module = LPIPS(net="alex", pnet_rand=True, verbose=False)
    state = torch.load(file, map_location="cpu", weights_only=True)
    # The package groups AlexNet's layers into slices: slice1.0.weight is features.0.weight.
    trunk = network.get_submodule("net")
    names = {name: "features." + name.split(".", 1)[1] for name in trunk.state_dict()}
    if absent := sorted(set(names.values()) - set(state)):
        raise ValueError(f"{file} is not an AlexNet state dict: it has no {absent[0]}")
    trunk.load_state_dict({name: state[source] for name, source in names.items()})
    return network
