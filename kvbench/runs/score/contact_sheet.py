"""Contact sheet of a run: pairs of reference and compressed image, the worst first."""

import io
import math
from collections.abc import Mapping

from PIL import Image, ImageDraw

from kvbench.eval.files.images import ImageSet

MAX_PAIRS, COLUMNS, GAP = 24, 4, 8
TITLE_HEIGHT, LINE_HEIGHT = 24, 13
"""Pixels of the title and of a line of a caption."""
CAPTION_HEIGHT = 3 * LINE_HEIGHT + 4
SIDES, SIDES_OF_ONE = (128, 256), (384, 1024)
"""Minimum and maximum pixels of an image's longer side, in a sheet and of a single pair: smaller images are enlarged
by whole factors, larger images are reduced."""


def draw_contact_sheet(
    images: ImageSet, reference: ImageSet, psnr: Mapping[int, float], run: str, method: str
) -> bytes:
    """Draw up to 24 pairs (full cache left, compressed right) under their prompts, the lowest PSNR first.

    Args:
        images: compressed images.
        reference: images of the reference.
        psnr: dB by sample index, infinite for equal images; if empty, pairs are ordered by index.
        run: method and budget for the title.
        method: caption of the compressed images.

    Returns:
        A PNG file.
    """
    chosen = sorted(images.indices, key=lambda index: psnr.get(index, float(index)))[:MAX_PAIRS]
    single = len(images.indices) == 1
    height, width = images.image(chosen[0]).shape[:2]
    size = _fit(width, height, SIDES_OF_ONE if single else SIDES)
    cell = (2 * size[0] + GAP, size[1] + CAPTION_HEIGHT + GAP)
    rows, columns = -(-len(chosen) // COLUMNS), min(COLUMNS, len(chosen))
    sheet = Image.new("RGB", (columns * (cell[0] + GAP) + GAP, TITLE_HEIGHT + rows * cell[1] + GAP), "white")
    draw = ImageDraw.Draw(sheet)
    order = "" if single else f"lowest PSNR first, {len(chosen)} of n = {len(images.indices)}; "
    title = f"{run}: {order}{_average(psnr)}"
    draw.text((GAP, GAP), _shorten(draw, title, sheet.width - 2 * GAP), fill="black")
    for place, index in enumerate(chosen):
        left = GAP + place % COLUMNS * (cell[0] + GAP)
        top = TITLE_HEIGHT + GAP + place // COLUMNS * cell[1]
        label = f"#{index}  {psnr[index]:.1f} dB" if index in psnr else f"#{index}"
        draw.text((left, top), label, fill="black")
        draw.text(
            (left, top + LINE_HEIGHT), _shorten(draw, images.samples[index].prompt, cell[0]), fill="#555555"
        )
        for column, (side, name) in enumerate(((reference, "full cache"), (images, method))):
            across = left + column * (size[0] + 2)
            draw.text((across, top + 2 * LINE_HEIGHT), _shorten(draw, name, size[0]), fill="#555555")
            picture = Image.fromarray(side.image(index))
            resampling = Image.Resampling.NEAREST if size[0] > picture.width else Image.Resampling.LANCZOS
            sheet.paste(picture.resize(size, resampling), (across, top + CAPTION_HEIGHT))
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG")
    return buffer.getvalue()


def _fit(width: int, height: int, sides: tuple[int, int]) -> tuple[int, int]:
    longer, (least, most) = max(width, height), sides
    scale = min(1.0, most / longer) if longer >= least else -(-least // longer)
    return round(width * scale), round(height * scale)


def _average(psnr: Mapping[int, float]) -> str:
    """Return the mean PSNR of the pairs that differ, as in the run's results."""
    finite = [value for value in psnr.values() if math.isfinite(value)]
    return f"psnr {math.fsum(finite) / len(finite):.2f} dB" if finite else "all equal to the reference"


def _shorten(draw: ImageDraw.ImageDraw, text: str, width: int) -> str:
    """Shorten a text to one line of `width` pixels; control characters and line ends become spaces."""
    text = "".join(letter if letter.isprintable() else " " for letter in text[: width + 1])
    while text and draw.textlength(text) > width:
        text = text[:-4] + "..." if not text.endswith("...") else text[:-7] + "..."
    return text
