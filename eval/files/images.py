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
from PIL import ExifTags, Image, ImageOps
from tqdm import tqdm

from kvbench.eval.files.samples import Sample, SampleSet, SampleSetError, map_in_threads


class ImageSet(SampleSet):
    """Images of a run by index: `images/000017.png` and a line in `samples.jsonl` for each.

    Raises:
        SampleSetError: records or images are missing, surplus, altered, truncated or not RGB.
    """

    kind: ClassVar[str] = "images"
    suffix: ClassVar[str] = ".png"

    def image(self, index: int) -> NDArray[np.uint8]:
        """Return the pixels uint8 [H, W, 3], RGB."""
        path = self._path(index)
        try:
            with Image.open(path) as image:
                return np.array(ImageOps.exif_transpose(image))
        except OSError as error:
            raise SampleSetError(f"{path} cannot be decoded: {error}") from error

    def stack(self, indices: Sequence[int]) -> NDArray[np.uint8]:
        """Return the pixels uint8 [N, H, W, 3] of images of one size."""
        return np.stack(map_in_threads(self.image, indices))

    def batches(self, size: int, title: str, indices: Sequence[int] | None = None) -> Iterator[list[int]]:
        """Yield consecutive `indices` (default all), at most `size` of one image size, with a progress bar."""
        chosen = self.indices if indices is None else indices
        with tqdm(
            total=len(chosen), desc=title, unit="image", leave=False, disable=None, mininterval=1.0
        ) as bar:
            for _, run in groupby(chosen, lambda index: self.samples[index].size):
                while batch := list(islice(run, size)):
                    yield batch
                    bar.update(len(batch))

    def stacks(self, size: int, title: str) -> Iterator[NDArray[np.uint8]]:
        """Yield the pixels uint8 [N, H, W, 3] of all images, in the batches of `batches`."""
        return map(self.stack, self.batches(size, title))

    def export(self, index: int, target: Path) -> None:
        """Link an image's file to another path, or copy it if links are not possible."""
        source = self._path(index).resolve()
        target.unlink(missing_ok=True)
        try:
            os.link(source, target)
        except OSError:  # another file system, or no support for links
            shutil.copyfile(source, target)

    def grid(self, indices: Sequence[int]) -> Image.Image:
        """Return a picture of images in rows of two, or of a single image; an empty cell is black.

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
    """Return width and height of an image file with content `data`.

    `decode` also checks that all pixels are readable, and returns the size of the image turned upright.

    Raises:
        SampleSetError: the content is not an image, is truncated, or is not 8-bit RGB without transparency.
    """
    try:
        with Image.open(io.BytesIO(data)) as image:
            if image.mode != "RGB":
                raise SampleSetError(f"{path} has mode {image.mode}: 8-bit RGB is needed")
            if flaw := find_flaw(image):
                raise SampleSetError(f"{path} {flaw}: 8-bit RGB is needed")
            if decode:
                image.load()
                return image.size[::-1] if find_orientation(image) > 4 else image.size
            return image.size
    except OSError as error:
        raise SampleSetError(f"{path} is not an image: {error}") from error


def find_orientation(image: Image.Image) -> int:
    """Return the EXIF orientation of an opened image, from 1 (upright) to 8; 5 to 8 exchange width and height."""
    orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    return orientation if orientation in range(1, 9) else 1


def find_flaw(image: Image.Image) -> str | None:
    """Return what an opened image would lose when converted to 8-bit RGB, or None.

    Pillow silently drops transparency and reads 16-bit RGB of PNG files as 8 bits.
    """
    if "transparency" in image.info or {"A", "a"} & set(image.getbands()):
        return "has transparency"
    tiles = getattr(image, "tile", ())
    deep = image.mode.startswith(("I", "F")) or any(";16B" in str(tile) for tile in tiles)
    return "has more than 8 bits per channel" if deep else None
