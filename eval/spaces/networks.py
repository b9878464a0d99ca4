"""Arithmetic, preprocessing and loading that pretrained networks share."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor


@contextlib.contextmanager
def full_float32() -> Iterator[None]:
    """Disable TF32, which changes the third digit of scores."""
    cudnn, matmul = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = cudnn, matmul


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


def stack_pictures(pixels: NDArray[np.uint8], transform: Callable[[Image.Image], Tensor]) -> Tensor:
    """Return images uint8 [N, H, W, 3] as their transforms, stacked."""
    return torch.stack([transform(Image.fromarray(image)) for image in pixels])


def load_pretrained(kind: Any, folder: Path, device: str, dtype: torch.dtype = torch.float32) -> Any:
    """Read a model from a folder that holds all of it; nothing is downloaded.

    Args:
        kind: a model class of transformers, whose own annotations do not cover this call.
        folder: configuration and weights.
        device: where it goes.
        dtype: type of its weights.

    Raises:
        ValueError: the folder lacks some of the weights, which transformers would make up at random.
    """
    model, found = kind.from_pretrained(folder, local_files_only=True, output_loading_info=True)
    absent = sorted(map(str, {*found["missing_keys"], *found["mismatched_keys"]}))
    if absent:
        raise ValueError(
            f"{folder} is not a whole {kind.__name__}: {absent[0]} is missing or of another shape"
        )
    return model.to(dtype).eval().to(device)
