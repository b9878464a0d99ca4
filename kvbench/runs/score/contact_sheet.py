"""The contact sheet of a run: reference beside compressed image, the worst pairs first."""

import io
import math
from collections.abc import Mapping

from PIL import Image, ImageDraw

from kvbench.eval.files.images import ImageSet

PAIRS, COLUMNS, GAP = 24, 4, 8
TITLE, LINE = 24, 13
"""Height in pixels of the title and of a line of a caption."""
CAPTION = 3 * LINE + 4
SMALLEST, LARGEST = 128, 256
"""Pixels of the longer side of a picture: smaller ones are enlarged by whole factors, larger ones reduced."""


def draw_contact_sheet(
    images: ImageSet, reference: ImageSet, psnr: Mapping[int, float], run: str, method: str
) -> bytes:
    """Draw up to 24 pairs (reference left, compressed right) under their prompts, the lowest PSNR first.

    Args:
        images: compressed ones.
        reference: the same samples, uncompressed.
        psnr: dB by index of the sample, infinite for equal images; without it pairs stand by index.
        run: what the title calls the run: its method and budget.
        method: caption of the compressed images.

    Returns:
        A PNG file.
    """
    chosen = sorted(images.indices, key=lambda index: psnr.get(index, float(index)))[:PAIRS]
    size = _fit(*images.image(chosen[0]).shape[1::-1])
    cell = (2 * size[0] + GAP, size[1] + CAPTION + GAP)
    rows, columns = -(-len(chosen) // COLUMNS), min(COLUMNS, len(chosen))
    sheet = Image.new("RGB", (columns * (cell[0] + GAP) + GAP, TITLE + rows * cell[1] + GAP), "white")
    draw = ImageDraw.Draw(sheet)
    title = f"{run}: lowest PSNR first, {len(chosen)} of n = {len(images.indices)}; {_average(psnr)}"
    draw.text((GAP, GAP), _shorten(draw, title, sheet.width - 2 * GAP), fill="black")
    for place, index in enumerate(chosen):
        left = GAP + place % COLUMNS * (cell[0] + GAP)
        top = TITLE + GAP + place // COLUMNS * cell[1]
        label = f"#{index}  {psnr[index]:.1f} dB" if index in psnr else f"#{index}"
        draw.text((left, top), label, fill="black")
        draw.text((left, top + LINE), _shorten(draw, images.samples[index].prompt, cell[0]), fill="#555555")
        for column, (side, name) in enumerate(((reference, "reference"), (images, method))):
            across = left + column * (size[0] + 2)
            draw.text((across, top + 2 * LINE), _shorten(draw, name, size[0]), fill="#555555")
            sheet.paste(_resize(Image.fromarray(side.image(index)), size), (across, top + CAPTION))
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG")
    return buffer.getvalue()


def _fit(width: int, height: int) -> tuple[int, int]:
    longer = max(width, height)
    scale = min(1.0, LARGEST / longer) if longer >= SMALLEST else -(-SMALLEST // longer)
    return round(width * scale), round(height * scale)


def _resize(picture: Image.Image, size: tuple[int, int]) -> Image.Image:
    enlarged = size[0] > picture.width
    return picture.resize(size, Image.Resampling.NEAREST if enlarged else Image.Resampling.LANCZOS)


def _average(psnr: Mapping[int, float]) -> str:
    """Return the mean PSNR of the pairs that differ, which is that of the run's results."""
    finite = [value for value in psnr.values() if math.isfinite(value)]
    return f"psnr {math.fsum(finite) / len(finite):.2f} dB" if finite else "all equal to the reference"


def _shorten(draw: ImageDraw.ImageDraw, text: str, width: int) -> str:
    """Cut off the end of a text that is wider than `width` pixels."""
    while text and draw.textlength(text) > width:
        text = text[:-4] + "..." if not text.endswith("...") else text[:-7] + "..."
    return text
