"""SSIM: structural similarity of 8-bit images."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.eval.networks import Pixels, to_unit
from kvbench.eval.paired.base import Measure, PairedScore
from kvbench.eval.protocol.scores import MetricSpec

BORDER = 5
"""Half the width of the 11 x 11 window without its centre, in pixels."""
SD = 1.5
"""Standard deviation of the Gaussian window, in pixels."""
C1, C2 = 0.01**2, 0.03**2
"""Wang's constants C1 and C2 for values in [0, 1]."""


@dataclass(frozen=True)
class Ssim(PairedScore):
    """`ssim`: structural similarity (Wang et al., 2004).

    Gaussian window of 11 x 11 with sigma 1.5, K = (0.01, 0.03), data range of 8 bits, per channel, then the mean.
    `ssim` averages the valid region, as Wang does, without the 5-pixel border where the window meets padding.
    `ssim_tm` averages all positions, as torchmetrics does by default. Its map has the same bits, but importing
    torchmetrics takes more time than a run's SSIM, and the base installation lacks it.

    Attributes:
        double: compute in float64, 15 times slower on a CPU; flat regions cost an image up to 1e-4 in float32.
    """

    double: bool = False
    name: ClassVar[str] = "ssim"
    revision: ClassVar[int] = 1
    protocol: ClassVar[str] = "gaussian11"
    metrics: ClassVar[Mapping[str, MetricSpec]] = {
        "ssim": MetricSpec("higher"),
        "ssim_tm": MetricSpec("higher", detail=True),
    }

    def load(self, device: str) -> tuple[Measure, Mapping[str, str]]:
        """Return a function from pairs of images to both averages of their similarity maps, which needs no files."""

        def measure(ours: Pixels, theirs: Pixels) -> list[torch.Tensor]:
            similarity = ssim_map(ours, theirs, device, double=self.double)
            return [
                maps.mean((1, 2, 3)) for maps in (similarity[..., BORDER:-BORDER, BORDER:-BORDER], similarity)
            ]

        return measure, {}


def ssim_map(ours: Pixels, theirs: Pixels, device: str, *, double: bool) -> torch.Tensor:
    """Return the similarity [N, 3, H, W] of images uint8 [N, H, W, 3] at every position, padded by reflection.

    Raises:
        ValueError: the images are smaller than the window.
    """
    if min(ours.shape[1:3]) <= 2 * BORDER:
        size = f"{ours.shape[2]}x{ours.shape[1]}"
        raise ValueError(f"ssim needs images larger than {2 * BORDER} pixels, got {size}")
    dtype = torch.float64 if double else torch.float32
    return map_similarity(*(to_unit(side, device, dtype) for side in (ours, theirs)))


def map_similarity(first: Tensor, second: Tensor) -> Tensor:
    """Return the similarity [N, C, H, W] of images of that shape in [0, 1] at every position, padded by reflection.

    Height and width must be larger than `BORDER`. Variances are small differences, which TF32 would lose.
    """
    channels = first.shape[1]
    offsets = torch.arange(-BORDER, BORDER + 1, dtype=first.dtype, device=first.device)
    taps = torch.exp(-(offsets / SD).square() / 2)
    taps = taps / taps.sum()
    window = (taps[:, None] * taps).expand(channels, 1, -1, -1)
    first, second = (F.pad(side, (BORDER,) * 4, mode="reflect") for side in (first, second))
    products = torch.cat((first, second, first * first, second * second, first * second))
    blurred = F.conv2d(products, window, groups=channels)
    mean, other, square, other_square, product = blurred.chunk(5)
    variance = (square - mean.square()).clamp(min=0)
    other_variance = (other_square - other.square()).clamp(min=0)
    above = 2 * (product - mean * other) + C2
    below = variance + other_variance + C2
    luminance = (2 * (mean * other) + C1, mean.square() + other.square() + C1)
    return luminance[0] * above / (luminance[1] * below)
