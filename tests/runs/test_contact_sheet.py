"""Contact sheets show the worst pairs first, the reference on the left."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kvbench.runs.score.contact_sheet import draw_contact_sheet
from tests.support.image_sets import make_set


def test_contact_sheet_shows_the_worst_first_and_the_reference_left(tmp_path: Path) -> None:
    images, reference = (
        make_set(tmp_path / name, [np.full((16, 16, 3), shade, np.uint8) for shade in shades])
        for name, shades in (("a", (10, 60, 110)), ("b", (20, 90, 110)))
    )
    psnr = {0: 28.1, 1: 18.6, 2: float("inf")}
    drawn = draw_contact_sheet(images, reference, psnr, "heatkv, 0.04", "heatkv")
    sheet = np.array(Image.open(io.BytesIO(drawn)))
    row = sheet[sheet.shape[0] - 2 * 8 - 64]  # in the middle of the pictures, above the gaps
    found = [int(shade[0]) for shade in row if len(set(map(int, shade))) == 1 and int(shade[0]) != 255]
    runs = [shade for i, shade in enumerate(found) if i == 0 or shade != found[i - 1]]
    assert runs == [90, 60, 20, 10, 110]


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [("two\nlines\u2028and\x1b[31m\x00\u202emore", "two lines and [31m  more"), ("w" * 10**6, "w" * 900)],
    ids=["lines", "word"],
)
def test_a_caption_is_one_line_of_any_prompt(tmp_path: Path, prompt: str, shown: str) -> None:
    grey, sheets = np.full((16, 16, 3), 10, np.uint8), []
    for number, text in enumerate((prompt, shown)):
        images, reference = (make_set(tmp_path / f"{side}{number}", [grey], [text]) for side in "ab")
        sheets.append(draw_contact_sheet(images, reference, {}, "heatkv, 0.04", "heatkv"))
    assert sheets[0] == sheets[1]
