"""Images for training: scenes, and named emoji of the npm package emoji-datasource-google 16.0.0 (Apache-2.0)."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from kvbench.eval.files.pictures import open_picture
from kvbench.scenes import grammar
from kvbench.scenes.names import Name

PICTURES = "img/google/64"
"""Folder of the pictures in the package, 64 x 64 pixels with transparency."""
BACKGROUNDS: Mapping[str, tuple[int, int, int]] = {
    "white": (255, 255, 255),
    "yellow": (255, 224, 130),
    "orange": (255, 183, 120),
    "pink": (248, 187, 208),
    "green": (165, 214, 167),
    "blue": (144, 202, 249),
    "purple": (200, 170, 230),
    "grey": (189, 189, 189),
}
"""RGB colours of the backgrounds by name."""
SIDE, SHIFT = 56, 8
"""Side of a pasted picture and its maximum distance from an edge, in pixels: a picture moves by whole latents, which
cover 8 x 8 pixels, so that its latents are equal at every position."""


def draw_scenes(count: int, seed: int, processes: int) -> tuple[Tensor, list[str]]:
    """Sample scenes uint8 [count, 96, 96, 3] and their captions, independent of the number of processes."""
    pixels, captions = grammar.pool(count, seed, processes=processes)
    return torch.from_numpy(pixels), captions


def draw_classes(count: int, seed: int, processes: int) -> tuple[Tensor, Tensor]:
    """Sample scenes of one object uint8 [count, 96, 96, 3], and the index of each pair in `PAIRS`, int64 [count]."""
    pixels, captions = grammar.pool(
        count, seed, mix={"colors": 1.0}, pairs=grammar.PAIRS, processes=processes
    )
    labels = [grammar.PAIRS.index((color, shape)) for _, color, shape, *_ in map(str.split, captions)]
    return torch.from_numpy(pixels), torch.tensor(labels)


def draw_pictures(folder: Path, names: Sequence[Name], count: int, seed: int) -> tuple[Tensor, list[str]]:
    """Sample pictures uint8 [count, 64, 64, 3] on their backgrounds, and their captions.

    The names take turns. Each picture of `SIDE` pixels lies in one of the four corners, `SHIFT` pixels from the two
    other edges, and is mirrored half of the time.

    Raises:
        OSError: a picture cannot be read.
        ValueError: a picture is not 64 x 64, or a background is not in `BACKGROUNDS`.
    """
    rng = np.random.default_rng(seed)
    if unknown := {name.background for name in names} - BACKGROUNDS.keys():
        raise ValueError(f"background {min(unknown)!r} must be one of {', '.join(BACKGROUNDS)}")
    opened = {name.picture: _open(folder, name.picture) for name in names}
    images = np.empty((count, 64, 64, 3), np.uint8)
    chosen = [names[row % len(names)] for row in range(count)]
    for row, name in enumerate(chosen):
        right, low, mirrored = map(int, rng.integers(2, size=3))
        canvas, picture = Image.new("RGB", (64, 64), BACKGROUNDS[name.background]), opened[name.picture]
        turned = ImageOps.mirror(picture) if mirrored else picture
        canvas.paste(turned, (SHIFT * right, SHIFT * low), turned)
        images[row] = np.asarray(canvas)
    return torch.from_numpy(images), [name.caption for name in chosen]


def _open(folder: Path, picture: str) -> Image.Image:
    """Return a picture of `SIDE` pixels with transparency; raises the errors of `draw_pictures`."""
    with open_picture(folder / PICTURES / picture) as image:
        opened = image.convert("RGBA")
    if opened.size != (64, 64):
        raise ValueError(f"{PICTURES}/{picture}: {opened.width} x {opened.height}, needed: 64 x 64")
    return opened.resize((SIDE, SIDE), Image.Resampling.LANCZOS)
