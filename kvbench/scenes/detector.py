"""Detector of coloured shapes: saturation, connected components, nearest colour, template overlap."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from kvbench.scenes.world import COLORS, SHAPES, SIDE, Object, Scene, render

SATURATION = 55
"""A pixel belongs to an object when its largest and smallest channel differ by more than this."""
SMALLEST = 60
"""Components of fewer pixels are specks."""
OVERLAP = 0.6
"""Least intersection over union with a template."""
GRID = 32


@dataclass(frozen=True)
class Instance:
    """One detected object: shape, certainty (always 1), box (x0, y0, x1, y1) in pixels, mask [96, 96], colour name."""

    label: str
    score: float
    box: tuple[float, float, float, float]
    mask: NDArray[np.bool_]
    color: str


@dataclass(frozen=True)
class Component:
    """Connected saturated pixels of an image, and what they resemble.

    Attributes:
        box: x0, y0, x1, y1 in pixels.
        mask: bool [H, W].
        overlaps: intersection over union with the template of each shape.
        distances: sum over channels of the absolute differences between the median colour and each named colour.
    """

    box: tuple[float, float, float, float]
    mask: NDArray[np.bool_]
    overlaps: Mapping[str, float]
    distances: Mapping[str, float]


def detect(image: Image.Image | NDArray[np.uint8]) -> list[Instance]:
    """Return the objects of an RGB image of the scenes world; shapes that fit no template are left out.

    Args:
        image: uint8 [H, W, 3], or a picture of that size.
    """
    found = []
    for one in find_components(image):
        shape = max(one.overlaps, key=lambda name: one.overlaps[name])
        if one.overlaps[shape] >= OVERLAP:
            color = min(one.distances, key=lambda name: one.distances[name])
            found.append(Instance(shape, 1.0, one.box, one.mask, color))
    return found


def find_components(image: Image.Image | NDArray[np.uint8]) -> list[Component]:
    """Return the connected saturated regions of an image as `detect` takes it, without specks."""
    from scipy import ndimage  # a twentieth of the time in which a command starts

    pixels = np.asarray(image).astype(np.int16)
    labels, _ = ndimage.label(np.ptp(pixels, axis=2) > SATURATION)
    found = []
    for number, window in enumerate(ndimage.find_objects(labels), start=1):
        inside = labels[window] == number
        if inside.sum() < SMALLEST:
            continue
        mask = labels == number
        rows, columns = window
        box = (float(columns.start), float(rows.start), float(columns.stop), float(rows.stop))
        found.append(Component(box, mask, _compare_shapes(inside), _compare_colors(pixels[mask])))
    return found


def _compare_colors(pixels: NDArray[np.int16]) -> dict[str, float]:
    typical = np.median(pixels, axis=0)
    return {name: float(np.abs(typical - color).sum()) for name, color in COLORS.items()}


def _compare_shapes(inside: NDArray[np.bool_]) -> dict[str, float]:
    normal = _stretch(inside)
    return {
        name: float(np.minimum(normal, template).sum() / np.maximum(normal, template).sum())
        for name, template in _templates().items()
    }


def _stretch(inside: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Stretch a component bool [h, w] to float32 [GRID, GRID], the share of each cell that it covers."""
    image = Image.fromarray(inside.astype(np.uint8) * 255).resize((GRID, GRID), Image.Resampling.BOX)
    return np.asarray(image, np.float32) / np.float32(255)


@lru_cache(maxsize=1)
def _templates() -> dict[str, NDArray[np.float32]]:
    templates = {}
    for shape in SHAPES:
        drawn = render(Scene((Object(shape, "red", SIDE / 2, SIDE / 2, 30.0),), "light")).astype(np.int16)
        mask = np.ptp(drawn, axis=2) > SATURATION
        rows, columns = mask.any(1).nonzero()[0], mask.any(0).nonzero()[0]
        templates[shape] = _stretch(mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1])
    return templates
