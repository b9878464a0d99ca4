"""Pictures with names of the npm package emoji-datasource-google 16.0.0 (pictures of Noto, Apache-2.0)."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from kvbench.core.files import hash_content, parse_json
from kvbench.scenes.names import Name

LIST = "emoji.json"
"""File of the package that names the pictures."""
PICTURES = "img/google/64"
"""Folder of the pictures, 64 x 64 with transparency."""
LEFT_OUT = frozenset({"alphanum", "family", "keycap", "skin-tone"})
"""Subcategories whose names do not tell their pictures apart: letters, silhouettes of families, patches of colour."""
FLAGS = frozenset({"country-flag", "subdivision-flag"})
HELD_OUT_SHARE = 0.115
"""Share of the names that may be held out; about half of them have words that no other name has."""
FLIPPED = frozenset({"Animals & Nature", "Food & Drink"})
"""Categories whose pictures may be mirrored: none of their names mentions a side, and none shows letters."""
SMALLEST = 0.8
"""Smallest size of a picture, as a share of its own."""


def list_names(folder: Path) -> tuple[Name, ...]:
    """Return the names of a package's folder in the order of the emoji list, without skin tones.

    Pictures that equal an earlier one, such as the flags of some islands, are left out, and so are later pictures of
    the same name.

    Raises:
        OSError: a file cannot be read.
        ValueError: `LIST` or a picture is not as in the package.
    """
    try:
        entries = sorted(parse_json((folder / LIST).read_bytes()), key=lambda entry: int(entry["sort_order"]))
        drawn = [entry for entry in entries if entry["subcategory"] not in LEFT_OUT]
        pictures = [str(entry["image"]) for entry in drawn]
        captions = [clean_name(str(entry["name"]), flag=entry["subcategory"] in FLAGS) for entry in drawn]
        categories = [str(entry["category"]) for entry in drawn]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{LIST}: not a list of named pictures ({type(error).__name__} {error})") from None
    seen: set[object] = set()
    kept: dict[str, Name] = {}
    for caption, category, picture in zip(captions, categories, pictures, strict=True):
        pixels = _open(folder, picture).tobytes()
        if caption not in kept and pixels not in seen:
            kept[caption] = Name(caption, category, picture, "train")
        seen.add(pixels)
    if not kept:
        raise ValueError(f"{LIST}: names no pictures")
    held_out = hold_out(kept)
    return tuple(
        name._replace(split="held_out" if name.caption in held_out else "train") for name in kept.values()
    )


def clean_name(name: str, *, flag: bool) -> str:
    """Return a name as words in lower case without accents and punctuation; `flag: <country>` for a flag.

    >>> clean_name("São Tomé & Príncipe Flag", flag=True)
    'flag: sao tome and principe'
    """
    text = (
        unicodedata.normalize("NFKD", name.lower().replace("&", " and ")).encode("ascii", "ignore").decode()
    )
    words = re.sub(r"[^a-z0-9 -]", "", text).replace("-", " ").split()
    return " ".join(["flag:", *words[:-1]] if flag and words[-1:] == ["flag"] else words)


def hold_out(captions: Iterable[str]) -> set[str]:
    """Return captions that are not trained on, chosen by their hashes; their words all occur in other captions."""
    words = {caption: set(caption.split()) for caption in captions}
    left = Counter(word for own in words.values() for word in own)
    chosen = set()
    for caption, own in words.items():
        drawn = int(hash_content(caption)[:8], 16) < HELD_OUT_SHARE * 16**8
        if drawn and all(left[word] > 1 for word in own):
            chosen.add(caption)
            left.subtract(own)
    return chosen


def draw_pictures(folder: Path, names: Sequence[Name], count: int, seed: int) -> tuple[Tensor, list[str]]:
    """Draw pictures uint8 [count, 64, 64, 3] on white, and their captions.

    The names take turns. Each picture has a random size from `SMALLEST` to 1 and a random place; pictures of the
    categories `FLIPPED` are mirrored half of the time.

    Raises:
        OSError: a picture cannot be read.
        ValueError: a picture is not 64 x 64.
    """
    rng = np.random.default_rng(seed)
    opened: Mapping[str, Image.Image] = {name.picture: _open(folder, name.picture) for name in names}
    images = np.empty((count, 64, 64, 3), np.uint8)
    chosen = [names[row % len(names)] for row in range(count)]
    for row, name in enumerate(chosen):
        side = round(64 * rng.uniform(SMALLEST, 1))
        place = rng.integers(64 - side + 1, size=2)
        mirrored = rng.random() < 0.5 and name.category in FLIPPED
        picture = ImageOps.mirror(opened[name.picture]) if mirrored else opened[name.picture]
        resized = picture.resize((side, side), Image.Resampling.LANCZOS)
        canvas = Image.new("RGB", (64, 64), "white")
        canvas.paste(resized, (int(place[0]), int(place[1])), resized)
        images[row] = np.asarray(canvas)
    return torch.from_numpy(images), [name.caption for name in chosen]


def _open(folder: Path, picture: str) -> Image.Image:
    with Image.open(folder / PICTURES / picture) as image:
        if image.size != (64, 64):
            raise ValueError(f"{PICTURES}/{picture}: {image.width} x {image.height}, needed: 64 x 64")
        return image.convert("RGBA")
