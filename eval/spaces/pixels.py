"""Preprocessing of images for pretrained networks."""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor


def resize_normalised(image: Image.Image, side: int, mean: Sequence[float], sd: Sequence[float]) -> Tensor:
    """Return an RGB image of any shape as a square, by PIL's bicubic filter, normalised: float32 [3, side, side].

    Args:
        image: 8 bits a channel.
        side: pixels.
        mean: of each channel, from 0 to 1.
        sd: standard deviation of each channel, on the same scale.
    """
    resized = np.asarray(image.resize((side, side), Image.Resampling.BICUBIC))
    return normalise(torch.from_numpy(resized.copy()).permute(2, 0, 1).float() / 255, mean, sd)


def normalise(pixels: Tensor, mean: Sequence[float], sd: Sequence[float]) -> Tensor:
    """Return pixels [3, H, W] less a mean over a standard deviation, one of each for every channel."""
    return (pixels - torch.tensor(mean)[:, None, None]) / torch.tensor(sd)[:, None, None]
