"""Infinity's published scale schedules: (height, width) in tokens per scale, by aspect ratio and pixel count."""

from types import MappingProxyType

Size = tuple[int, int]

SCALES = MappingProxyType({"0.06M": 7, "0.25M": 10, "0.60M": 12, "1M": 13})
"""Number of leading scales of the one-megapixel schedule for each pixel count."""

_TALL = MappingProxyType(
    {
        1: "1,1 2,2 4,4 6,6 8,8 12,12 16,16 20,20 24,24 32,32 40,40 48,48 64,64",
        1.25: "1,1 2,2 3,3 5,4 10,8 15,12 20,16 25,20 30,24 35,28 45,36 55,44 70,56",
        1.333: "1,1 2,2 4,3 8,6 12,9 16,12 20,15 24,18 28,21 36,27 48,36 60,45 72,54",
        1.5: "1,1 2,2 3,2 6,4 9,6 15,10 21,14 27,18 33,22 39,26 48,32 63,42 78,52",
        1.75: "1,1 2,2 3,3 7,4 11,6 14,8 21,12 28,16 35,20 42,24 56,32 70,40 84,48",
        2: "1,1 2,2 4,2 6,3 10,5 16,8 22,11 30,15 38,19 46,23 60,30 74,37 90,45",
        2.5: "1,1 2,2 5,2 10,4 15,6 20,8 25,10 30,12 40,16 50,20 65,26 80,32 100,40",
        3: "1,1 2,2 6,2 9,3 15,5 21,7 27,9 36,12 45,15 54,18 72,24 90,30 111,37",
    }
)


def _parse(text: str) -> tuple[Size, ...]:
    return tuple((int(height), int(width)) for height, width in (pair.split(",") for pair in text.split()))


TEMPLATES = MappingProxyType(
    {
        key: sizes
        for ratio, tall in ((ratio, _parse(text)) for ratio, text in _TALL.items())
        for key, sizes in ((ratio, tall), (int(1 / ratio * 1000) / 1000, tuple((w, h) for h, w in tall)))
    }
)
"""The 13 scales of one megapixel by height / width; positions of all sizes are stretched onto the last scale."""


def rotary_grid(aspect: float) -> Size:
    """Return the (rows, columns) onto which positions of all scales of a ratio are stretched, at any pixel count.

    >>> rotary_grid(1.5)
    (78, 52)

    Raises:
        ValueError: `aspect` is not one of `TEMPLATES`.
    """
    if aspect not in TEMPLATES:
        known = ", ".join(f"{ratio:g}" for ratio in sorted(TEMPLATES))
        nearest = min(TEMPLATES, key=lambda ratio: abs(ratio - aspect))
        raise ValueError(
            f"model.aspect={aspect}: must be one of the published height / width {known}; {nearest:g} is nearest"
        )
    return TEMPLATES[aspect][-1]


def schedule(aspect: float, pixels: str) -> tuple[Size, ...]:
    """Return the scales, (height, width) in tokens, for height / width `aspect` and a pixel count.

    >>> schedule(1.0, "0.06M")
    ((1, 1), (2, 2), (4, 4), (6, 6), (8, 8), (12, 12), (16, 16))

    Raises:
        ValueError: `aspect` is not one of `TEMPLATES`, or `pixels` not one of `SCALES`.
    """
    if pixels not in SCALES:
        raise ValueError(f"model.pixels={pixels}: must be one of {', '.join(SCALES)}")
    rotary_grid(aspect)  # raises if the ratio is not a published one
    return TEMPLATES[aspect][: SCALES[pixels]]
