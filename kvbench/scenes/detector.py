"""Detector of coloured shapes: saturation, connected components, nearest colour, template overlap."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage

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


def detect(image: Image.Image | NDArray[np.uint8]) -> list[Instance]:
    """Return the objects of an RGB image of the scenes world; shapes that fit no template are left out.

    Args:
        image: uint8 [H, W, 3], or a picture of that size.
    """
    pixels = np.asarray(image).astype(np.int16)
    labels, _ = ndimage.label(np.ptp(pixels, axis=2) > SATURATION)
    found = []
    for number, window in enumerate(ndimage.find_objects(labels), start=1):
        inside = labels[window] == number
        if inside.sum() < SMALLEST:
            continue
        shape, overlap = _name_shape(inside)
        if overlap < OVERLAP:
            continue
        mask = labels == number
        rows, columns = window
        box = (float(columns.start), float(rows.start), float(columns.stop), float(rows.stop))
        found.append(Instance(shape, 1.0, box, mask, _name_color(pixels[mask])))
    return found


def _name_color(pixels: NDArray[np.int16]) -> str:
    typical = np.median(pixels, axis=0)
    names = list(COLORS)
    distances = [np.abs(typical - COLORS[name]).sum() for name in names]
    return names[int(np.argmin(distances))]


def _name_shape(inside: NDArray[np.bool_]) -> tuple[str, float]:
    normal = _stretch(inside)
    overlaps = {
        name: np.minimum(normal, template).sum() / np.maximum(normal, template).sum()
        for name, template in _templates().items()
    }
    best = max(overlaps, key=lambda name: float(overlaps[name]))
    return best, float(overlaps[best])


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
        window = ndimage.find_objects(mask.astype(int))[0]
        templates[shape] = _stretch(mask[window])
    return templates
