"""Picture of the same samples of several runs: a row per run, a column per prompt.

python -m benchmarks sheet --runs RUN [MORE ...] --samples 0 40 80 --png FILE
"""

import argparse
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from benchmarks.support.arguments import Option
from kvbench.eval.files.pictures import open_picture
from kvbench.runs.record.folder import RunName
from kvbench.runs.record.samples import find_sample

OPTIONS = {
    "runs": Option([], "folders of runs of images, from the top down", type=str),
    "samples": Option([], "numbers of the samples, from the left", type=int),
    "scale": Option(1, "whole factor by which images are enlarged"),
    "png": Option("", "file for the picture"),
}
GAP = 4
"""Pixels between images."""
LABEL = 14
"""Height of a run's label in pixels."""


def main(options: argparse.Namespace) -> None:
    """Write the picture.

    Raises:
        ValueError: nothing is named, a run lacks a sample, or images differ in size.
    """
    if not (options.runs and options.samples and options.png):
        raise ValueError("--runs, --samples and --png must name runs, samples and a file")
    rows = {Path(run): read_samples(Path(run), options.samples) for run in options.runs}
    sizes = {image.size for images in rows.values() for image in images}
    if len(sizes) > 1:
        raise ValueError(f"--runs: images of different sizes ({', '.join(map(str, sorted(sizes)))})")
    width, height = (side * options.scale for side in sizes.pop())
    step = height + LABEL + GAP
    sheet = Image.new("RGB", (len(options.samples) * (width + GAP) - GAP, len(rows) * step - GAP), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(LABEL - 3)
    for row, (run, images) in enumerate(rows.items()):
        draw.text((0, row * step), RunName.of(run.name).label, "black", font)
        for column, image in enumerate(images):
            enlarged = image.resize((width, height), Image.Resampling.NEAREST)
            sheet.paste(enlarged, (column * (width + GAP), row * step + LABEL))
    sheet.save(options.png)


def _read(path: Path) -> Image.Image:
    with open_picture(path) as image:
        return image.convert("RGB")


def read_samples(run: Path, samples: list[int]) -> list[Image.Image]:
    """Return images of a run by number.

    Raises:
        ValueError: the run lacks one of them.
    """
    try:
        return [_read(find_sample(run, number)) for number in samples]
    except ValueError as error:
        raise ValueError(f"--runs {run}: {error}") from None
