"""The contact sheet of a run: reference beside compressed image, the worst pairs first."""

import io
from collections.abc import Mapping

from PIL import Image, ImageDraw

from kvbench.eval.files.images import ImageSet

PAIRS, COLUMNS, CAPTION, GAP, LARGEST = 24, 4, 30, 8, 256


def draw_contact_sheet(images: ImageSet, reference: ImageSet, psnr: Mapping[int, float]) -> bytes:
    """Draw up to 24 pairs (reference left, compressed right) under their prompts, the lowest PSNR first.

    Args:
        images: compressed ones.
        reference: the same samples, uncompressed.
        psnr: dB by index of the sample, infinite for equal images; without it pairs stand by index.

    Returns:
        A PNG file.
    """
    chosen = sorted(images.indices, key=lambda index: psnr.get(index, float(index)))[:PAIRS]
    height, width = images.image(chosen[0]).shape[:2]
    scale = min(1.0, LARGEST / max(height, width))
    width, height = round(width * scale), round(height * scale)
    cell = (2 * width + GAP, height + CAPTION + GAP)
    rows = -(-len(chosen) // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * (cell[0] + GAP) + GAP, rows * cell[1] + GAP), "white")
    draw = ImageDraw.Draw(sheet)
    for place, index in enumerate(chosen):
        left = GAP + place % COLUMNS * (cell[0] + GAP)
        top = GAP + place // COLUMNS * cell[1]
        label = f"#{index}  {psnr[index]:.1f} dB" if index in psnr else f"#{index}"
        draw.text((left, top), label, fill="black")
        draw.text((left, top + 13), _shorten(draw, images.samples[index].prompt, cell[0]), fill="#555555")
        for column, side in enumerate((reference, images)):
            picture = Image.fromarray(side.image(index)).resize((width, height), Image.Resampling.LANCZOS)
            sheet.paste(picture, (left + column * (width + 2), top + CAPTION))
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG")
    return buffer.getvalue()


def _shorten(draw: ImageDraw.ImageDraw, text: str, width: int) -> str:
    """Cut off the end of a text that is wider than `width` pixels."""
    while text and draw.textlength(text) > width:
        text = text[:-4] + "..." if not text.endswith("...") else text[:-7] + "..."
    return text
