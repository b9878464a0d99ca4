"""Detector of coloured shapes: saturation, connected components, nearest colour, template overlap."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from kvbench.eval.geneval.rules import MaskedInstance
from kvbench.scenes.world import COLORS, SHAPES, SIDE, Object, Scene, render

MIN_SATURATION = 55
"""A pixel belongs to an object if its largest and smallest channel (0 to 255) differ by more than this."""
MIN_PIXELS = 60
"""Minimum number of pixels of a region that counts as an object."""
MIN_OVERLAP = 0.6
"""Minimum intersection over union of a known shape with its template."""
GRID = 32  # cells per side of a template


@dataclass(frozen=True)
class Region:
    """Connected saturated pixels of an image, compared with shapes and colours.

    Attributes:
        box: x0, y0, x1, y1 in pixels, ends exclusive.
        mask: bool [H, W].
        overlaps: intersection over union with the template of each shape, by its name.
        distances: absolute difference, summed over 8-bit channels, between the median colour and each named colour.
    """

    box: tuple[float, float, float, float]
    mask: NDArray[np.bool_]
    overlaps: Mapping[str, float]
    distances: Mapping[str, float]


def detect(image: Image.Image | NDArray[np.uint8]) -> list[MaskedInstance]:
    """Return the objects of an RGB image uint8 [H, W, 3] of the scenes world, of score 1, without unknown shapes."""
    shapes = []
    for region in find_regions(image):
        shape = max(region.overlaps, key=lambda name: region.overlaps[name])
        if region.overlaps[shape] >= MIN_OVERLAP:
            color = min(region.distances, key=lambda name: region.distances[name])
            shapes.append(MaskedInstance(shape, 1.0, region.box, color, mask=region.mask))
    return shapes


def find_regions(image: Image.Image | NDArray[np.uint8]) -> list[Region]:
    """Return the connected saturated regions of an RGB image uint8 [H, W, 3], except regions below `MIN_PIXELS`."""
    from scipy import ndimage  # takes a twentieth of a command's start

    pixels = np.asarray(image).astype(np.int16)
    labels, _ = ndimage.label(np.ptp(pixels, axis=2) > MIN_SATURATION)
    regions = []
    for label, window in enumerate(ndimage.find_objects(labels), start=1):
        inside = labels[window] == label
        if inside.sum() < MIN_PIXELS:
            continue
        mask = labels == label
        rows, columns = window
        box = (float(columns.start), float(rows.start), float(columns.stop), float(rows.stop))
        regions.append(Region(box, mask, _compare_shapes(inside), _compare_colors(pixels[mask])))
    return regions


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
    """Return the covered share of each cell of a region bool [h, w], float32 [GRID, GRID]."""
    image = Image.fromarray(inside.astype(np.uint8) * 255).resize((GRID, GRID), Image.Resampling.BOX)
    return np.asarray(image, np.float32) / np.float32(255)


@lru_cache(maxsize=1)
def _templates() -> dict[str, NDArray[np.float32]]:
    templates = {}
    for shape in SHAPES:
        drawn = render(Scene((Object(shape, "red", SIDE / 2, SIDE / 2, 30.0),), "light")).astype(np.int16)
        mask = np.ptp(drawn, axis=2) > MIN_SATURATION
        rows, columns = mask.any(1).nonzero()[0], mask.any(0).nonzero()[0]
        templates[shape] = _stretch(mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1])
    return templates
