"""Structural similarity in a sliding Gaussian window (Wang et al., 2004): the maps behind SSIM and MS-SSIM."""

import torch
from torch import Tensor
from torch.nn import functional as F

BORDER = 5
"""Half the width of the 11 x 11 window, in pixels."""
SD = 1.5
"""Standard deviation of the window, in pixels."""
C1, C2 = 0.01**2, 0.03**2
"""Wang's constants for values in [0, 1]."""


def map_similarity(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return similarity, and its factor without luminance, at every position.

    Variances are small differences, which TF32 would lose.

    Args:
        first: [N, C, H, W] with values in [0, 1], larger than `BORDER` on both sides; padded by reflection.
        second: images of the same shape.

    Returns:
        Two maps [N, C, H, W].
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
    return luminance[0] * above / (luminance[1] * below), above / below


def crop_border(maps: Tensor) -> Tensor:
    """Return the valid region of maps [N, C, H, W], without positions affected by padding."""
    return maps[..., BORDER:-BORDER, BORDER:-BORDER]
