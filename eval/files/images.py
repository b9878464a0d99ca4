"""Image folders: pixels of a run's samples, and checks of image files."""

import io
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, islice
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tqdm import tqdm

from kvbench.eval.files.samples import Sample, SampleSet, SampleSetError, map_in_threads


class ImageSet(SampleSet):
    """Images of one run by index: `images/000017.png` and one line each in `samples.jsonl`.

    Every file is read once at the start and checked against its record.

    Args:
        folder: the run folder.

    Raises:
        SampleSetError: records or images are missing, surplus, altered, truncated or not RGB.
    """

    kind: ClassVar[str] = "images"
    suffix: ClassVar[str] = ".png"

    def image(self, index: int) -> NDArray[np.uint8]:
        """Pixels uint8 [H, W, 3], RGB."""
        path = self._path(index)
        try:
            with Image.open(path) as image:
                return np.array(image)
        except OSError as error:
            raise SampleSetError(f"{path} cannot be decoded: {error}") from error

    def stack(self, indices: Sequence[int]) -> NDArray[np.uint8]:
        """Pixels uint8 [N, H, W, 3] of images of one size."""
        return np.stack(map_in_threads(self.image, indices))

    def batches(self, size: int, title: str, indices: Sequence[int] | None = None) -> Iterator[list[int]]:
        """Consecutive ones of `indices` (all), at most `size` and of one image size, behind a progress bar."""
        chosen = self.indices if indices is None else indices
        with tqdm(
            total=len(chosen), desc=title, unit="image", leave=False, disable=None, mininterval=1.0
        ) as bar:
            for _, run in groupby(chosen, lambda index: self.samples[index].size):
                while batch := list(islice(run, size)):
                    yield batch
                    bar.update(len(batch))

    def stacks(self, size: int, title: str) -> Iterator[NDArray[np.uint8]]:
        """Pixels uint8 [N, H, W, 3] of all images in order, in the batches of `batches`."""
        return map(self.stack, self.batches(size, title))

    def export(self, index: int, target: Path) -> None:
        """Put an image's file at another place, as a link where the file system allows it."""
        source = self._path(index).resolve()
        target.unlink(missing_ok=True)
        try:
            os.link(source, target)
        except OSError:  # another file system, or one without links
            shutil.copyfile(source, target)

    def grid(self, indices: Sequence[int]) -> Image.Image:
        """Images of one size in a picture, in rows of two; a single one alone. A cell too many is black.

        Raises:
            ValueError: the images have several sizes.
        """
        sizes = {self.samples[index].size for index in indices}
        if len(sizes) > 1:
            raise ValueError(f"images {list(indices)} have several sizes: {sorted(sizes)}")
        [(width, height)] = sizes
        picture = Image.new("RGB", (width * min(len(indices), 2), height * -(-len(indices) // 2)))
        for number, index in enumerate(indices):
            picture.paste(Image.fromarray(self.image(index)), (number % 2 * width, number // 2 * height))
        return picture

    def _checked(self, sample: Sample) -> Sample:
        return replace(sample, size=read_size(self._path(sample.index), self._read(sample)))


def read_size(path: Path, data: bytes, *, decode: bool = False) -> tuple[int, int]:
    """Return width and height of an image file that can be scored.

    Args:
        path: names the file in errors.
        data: its content.
        decode: also make sure that every pixel can be read.

    Raises:
        SampleSetError: it is no image, is cut short, or is not 8-bit RGB without transparency.
    """
    try:
        with Image.open(io.BytesIO(data)) as image:
            if image.mode != "RGB":
                raise SampleSetError(f"{path} has mode {image.mode}: 8-bit RGB is needed")
            if flaw := find_flaw(image):
                raise SampleSetError(f"{path} {flaw}: 8-bit RGB is needed")
            if decode:
                image.load()
            return image.size
    except OSError as error:
        raise SampleSetError(f"{path} is not an image: {error}") from error


def find_flaw(image: Image.Image) -> str | None:
    """Return what an opened image would lose on the way to 8-bit RGB, None if nothing.

    Pillow leaves out transparency, and reads PNG files of 16-bit RGB as if they had 8, without a word.
    """
    if "transparency" in image.info or {"A", "a"} & set(image.getbands()):
        return "has transparency"
    deep = image.mode.startswith(("I", "F")) or any(
        ";16B" in str(tile) for tile in getattr(image, "tile", ())
    )
    return "has more than 8 bits per channel" if deep else None
