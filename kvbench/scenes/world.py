"""Scenes of one to four coloured shapes and their renderer."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SIDE = 96  # pixels
SHAPES = ("circle", "square", "triangle", "ring", "cross")
COLORS: dict[str, tuple[int, int, int]] = {
    "red": (220, 45, 45),
    "yellow": (235, 205, 40),
    "green": (45, 165, 65),
    "cyan": (45, 195, 215),
    "blue": (50, 75, 215),
    "purple": (155, 60, 195),
}
BACKGROUNDS: dict[str, int] = {"light": 232, "dark": 44}  # grey levels, 0 to 255


@dataclass(frozen=True)
class Object:
    """One shape: its name, its colour's name, and its centre and radius in pixels."""

    shape: str
    color: str
    x: float
    y: float
    r: float


@dataclass(frozen=True)
class Scene:
    """Objects that do not touch, on a background named in `BACKGROUNDS`."""

    objects: tuple[Object, ...]
    background: str


_ROWS, _COLUMNS = np.mgrid[0:SIDE, 0:SIDE].astype(np.float32) + 0.5


def _distance(shape: str, x: NDArray[np.floating], y: NDArray[np.floating], r: float) -> NDArray[np.floating]:
    """Return the signed distance in pixels to a shape's outline, negative inside; x, y are relative to the centre."""
    if shape == "circle":
        return np.hypot(x, y) - r
    if shape == "ring":
        return np.abs(np.hypot(x, y) - 0.74 * r) - 0.26 * r
    if shape == "square":
        return np.maximum(np.abs(x), np.abs(y)) - 0.86 * r
    if shape == "triangle":
        slanted = (np.abs(x) * 2 - y - r) / 5**0.5
        return np.maximum(slanted, y - 0.85 * r)
    return np.minimum(
        np.maximum(np.abs(x) - 0.32 * r, np.abs(y) - r), np.maximum(np.abs(x) - r, np.abs(y) - 0.32 * r)
    )


def render(scene: Scene) -> NDArray[np.uint8]:
    """Return the RGB image of a scene, uint8 [96, 96, 3], with edges antialiased over one pixel."""
    image = np.full((SIDE, SIDE, 3), BACKGROUNDS[scene.background], np.float32)
    for item in scene.objects:
        top, left = (max(int(c - item.r) - 2, 0) for c in (item.y, item.x))
        window = (slice(top, int(item.y + item.r) + 3), slice(left, int(item.x + item.r) + 3))
        distance = _distance(item.shape, _COLUMNS[window] - item.x, _ROWS[window] - item.y, item.r)
        cover = np.clip(0.5 - distance, 0, 1)[..., None]
        image[window] += cover * (np.array(COLORS[item.color], np.float32) - image[window])
    return np.rint(image).astype(np.uint8)
