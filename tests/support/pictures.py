"""A folder like the npm package emoji-datasource-google, with drawn pictures."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

Entry = tuple[str, str, str]
"""Name, category and subcategory of a picture."""
COLOURS = ("RED", "GREEN", "BLUE", "BLACK", "YELLOW")
SHAPES = ("BALL", "BOX", "BAR", "HAT")
TWENTY: tuple[Entry, ...] = tuple(
    (f"{colour} {shape}", "Food & Drink", "toy") for colour in COLOURS for shape in SHAPES
)


def write_package(folder: Path, entries: Sequence[Entry] = TWENTY, **changes: Any) -> Path:
    """Write the list and a different picture of each entry; `changes` are fields that all entries have instead."""
    pictures = folder / "img" / "google" / "64"
    pictures.mkdir(parents=True, exist_ok=True)
    for number in range(len(entries)):
        image = Image.new("RGBA", (64, 64))
        red, green = 20 + 9 * number % 200, 200 - 7 * number % 180
        ImageDraw.Draw(image).ellipse((4, 4, 60, 20 + number % 40), fill=(red, green, 90, 255))
        image.save(pictures / f"{number}.png")
    lines = [
        {"name": name, "category": category, "subcategory": part, "image": f"{number}.png"}
        for number, (name, category, part) in enumerate(entries)
    ]
    ordered = [{**line, "sort_order": number, **changes} for number, line in enumerate(lines)]
    (folder / "emoji.json").write_text(json.dumps(ordered[::-1]))
    return folder
