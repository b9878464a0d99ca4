"""Pictures with names of the npm package emoji-datasource-google 16.0.0 (pictures of Noto, Apache-2.0)."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor

from kvbench.core.files import hash_content, parse_json, read_bytes
from kvbench.eval.files.pictures import open_picture as open_image
from kvbench.scenes.names import Name

Colour = tuple[int, int, int]
Pixels = NDArray[np.uint8]


class Variant(NamedTuple):
    """Corner of a drawing, and whether it is mirrored; each 0 or 1."""

    right: int
    low: int
    mirrored: int


LIST = "emoji.json"
"""File of the package that names the pictures."""
PICTURES = "img/google/64"
"""Folder of the pictures, 64 x 64 with transparency."""
CATEGORIES = frozenset({"Animals & Nature", "Food & Drink"})
"""Categories whose pictures are used. They may be mirrored: no name mentions a side, and no picture shows letters."""
BACKGROUNDS: Mapping[str, Colour] = {
    "white": (255, 255, 255),
    "yellow": (255, 224, 130),
    "orange": (255, 183, 120),
    "pink": (248, 187, 208),
    "green": (165, 214, 167),
    "blue": (144, 202, 249),
    "purple": (200, 170, 230),
    "grey": (189, 189, 189),
}
"""Colours behind a picture, of which each name has all."""
HELD_OUT_SHARE = 0.3
"""Share of the names that may be held out; most of them have words that no other name has."""
SIDE, SHIFT = 56, 8
"""Size of a drawn picture and its largest distance from an edge, in pixels: a picture moves by whole cells of latents
that have 8 pixels a side, so that these are the same in each place."""


def list_names(folder: Path) -> tuple[Name, ...]:
    """Return the names of a package's folder on every background, in the order of the emoji list.

    Pictures that equal an earlier one are left out, and so are later pictures of the same name.

    Raises:
        OSError: a file cannot be read.
        ValueError: `LIST` or a picture is not as in the package.
    """
    try:
        entries = sorted(parse_json(read_bytes(folder / LIST)), key=lambda entry: int(entry["sort_order"]))
        drawn = [entry for entry in entries if entry["category"] in CATEGORIES]
        rows = [(clean_name(str(one["name"])), str(one["category"]), str(one["image"])) for one in drawn]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{LIST}: not a list of named pictures ({type(error).__name__} {error})") from None
    seen: set[bytes] = set()
    kept: dict[str, tuple[str, str]] = {}
    for name, category, picture in rows:
        pixels = _open(folder, picture).tobytes()
        if name not in kept and pixels not in seen:
            kept[name] = (category, picture)
        seen.add(pixels)
    if not kept:
        raise ValueError(f"{LIST}: names no pictures of {' or '.join(sorted(CATEGORIES))}")
    held_out = hold_out(kept)
    return tuple(
        Name(f"{name} on {colour}", *where, colour, "held_out" if name in held_out else "train")
        for name, where in kept.items()
        for colour in BACKGROUNDS
    )


def clean_name(name: str) -> str:
    """Return a name as words in lower case without accents and punctuation.

    >>> clean_name("T-Rex & Jalapeño")
    't rex and jalapeno'
    """
    text = (
        unicodedata.normalize("NFKD", name.lower().replace("&", " and ")).encode("ascii", "ignore").decode()
    )
    return " ".join(re.sub(r"[^a-z0-9 -]", "", text).replace("-", " ").split())


def hold_out(names: Iterable[str]) -> set[str]:
    """Return names that are not trained on, chosen by their hashes; their words all occur in other names."""
    words = {name: set(name.split()) for name in names}
    left = Counter(word for own in words.values() for word in own)
    chosen = set()
    for name, own in words.items():
        drawn = int(hash_content(name)[:8], 16) < HELD_OUT_SHARE * 16**8
        if drawn and all(left[word] > 1 for word in own):
            chosen.add(name)
            left.subtract(own)
    return chosen


def draw_pictures(folder: Path, names: Sequence[Name], count: int, seed: int) -> tuple[Tensor, list[str]]:
    """Draw pictures uint8 [count, 64, 64, 3] on their backgrounds, and their captions.

    The names take turns. Each picture of `SIDE` pixels is in one of the four corners, `SHIFT` pixels from the other
    ones, and is mirrored half of the time.

    Raises:
        OSError: a picture cannot be read.
        ValueError: a picture is not 64 x 64, or a background is not in `BACKGROUNDS`.
    """
    rng = np.random.default_rng(seed)
    if unknown := {name.background for name in names} - BACKGROUNDS.keys():
        raise ValueError(f"background {min(unknown)!r} must be one of {', '.join(BACKGROUNDS)}")
    opened = {name.picture: open_picture(folder, name.picture) for name in names}
    images = np.empty((count, 64, 64, 3), np.uint8)
    chosen = [names[row % len(names)] for row in range(count)]
    for row, name in enumerate(chosen):
        variant = Variant(*map(int, rng.integers(2, size=3)))
        images[row] = draw_variant(opened[name.picture], name.background, variant)
    return torch.from_numpy(images), [name.caption for name in chosen]


def open_picture(folder: Path, picture: str) -> Image.Image:
    """Return a picture of `SIDE` pixels with transparency; raises the errors of `draw_pictures`."""
    return _open(folder, picture).resize((SIDE, SIDE), Image.Resampling.LANCZOS)


def draw_variant(picture: Image.Image, background: str, variant: Variant) -> Pixels:
    """Draw a picture of `open_picture` on a background, uint8 [64, 64, 3]."""
    canvas = Image.new("RGB", (64, 64), BACKGROUNDS[background])
    turned = ImageOps.mirror(picture) if variant.mirrored else picture
    canvas.paste(turned, (SHIFT * variant.right, SHIFT * variant.low), turned)
    return np.asarray(canvas)


def _open(folder: Path, picture: str) -> Image.Image:
    with open_image(folder / PICTURES / picture) as image:
        opened = image.convert("RGBA")
    if opened.size != (64, 64):
        raise ValueError(f"{PICTURES}/{picture}: {opened.width} x {opened.height}, needed: 64 x 64")
    return opened
