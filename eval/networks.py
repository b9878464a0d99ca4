"""Arithmetic, preprocessing and loading shared by pretrained networks."""

import contextlib
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from kvbench.core.devices import tf32

Pixels = NDArray[np.uint8]
"""An RGB image [H, W, 3], or several [N, H, W, 3]."""
full_float32 = partial(tf32, convolutions=False, products=False)
"""Context manager without TF32, which changes the third digit of scores."""


@contextlib.contextmanager
def expecting(what: str, file: Path) -> Iterator[None]:
    """Turn errors of loading a file's tensors into a network into a ValueError: the file does not hold `what`.

    Torch's OutOfMemoryError passes.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, KeyError, RuntimeError, ValueError, zipfile.BadZipFile) as error:
        lacks = isinstance(error, KeyError)
        why = f"it has no {error.args[0]}" if lacks else str(error).splitlines()[-1].strip()
        raise ValueError(f"{file} does not hold {what}: {why}") from None


def resize_normalised(pixels: Pixels, side: int, mean: Sequence[float], sd: Sequence[float]) -> Tensor:
    """Return images uint8 [N, H, W, 3] resized to squares (PIL, bicubic) and normalised, float32 [N, 3, side, side].

    Mean and standard deviation of each channel are on the scale from 0 to 1.
    """

    def transform(image: Image.Image) -> Tensor:
        resized = np.asarray(image.resize((side, side), Image.Resampling.BICUBIC))
        return normalise(torch.from_numpy(resized.copy()).permute(2, 0, 1).float() / 255, mean, sd)

    return stack_pictures(pixels, transform)


def normalise(pixels: Tensor, mean: Sequence[float], sd: Sequence[float]) -> Tensor:
    """Return pixels [3, H, W] normalised by mean and standard deviation of each channel."""
    return (pixels - torch.tensor(mean)[:, None, None]) / torch.tensor(sd)[:, None, None]


def stack_pictures(pixels: Pixels, transform: Callable[[Image.Image], Tensor]) -> Tensor:
    """Return the stacked transforms [N, ...] of images uint8 [N, H, W, 3]."""
    return torch.stack([transform(Image.fromarray(image)) for image in pixels])


def to_unit(pixels: Pixels, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    """Return images uint8 [N, H, W, 3] as `dtype` [N, 3, H, W] in [0, 1] on a device."""
    return torch.from_numpy(pixels).to(device).permute(0, 3, 1, 2).to(dtype) / 255


def load_pretrained(kind: Any, folder: Path, device: str, dtype: torch.dtype = torch.float32) -> Any:
    """Load a model of a transformers class from a folder; nothing is downloaded.

    Raises:
        ValueError: weights are missing, which transformers would initialise at random.
    """
    model, loading = kind.from_pretrained(folder, local_files_only=True, output_loading_info=True)
    if wrong := sorted(map(str, {*loading["missing_keys"], *loading["mismatched_keys"]})):
        raise ValueError(
            f"{folder} is not a whole {kind.__name__}: {wrong[0]} is missing or of another shape; copy it again"
        )
    return model.to(dtype).eval().to(device)
