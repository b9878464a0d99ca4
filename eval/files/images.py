"""Image folders: pixels of a run's samples, and checks of image files."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, islice
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from kvbench.core.bars import make_bar
from kvbench.core.links import link_or_copy
from kvbench.eval.files.pictures import find_flaw, find_orientation, open_picture
from kvbench.eval.files.samples import Sample, SampleSet, SampleSetError, map_in_threads


class ImageSet(SampleSet):
    """Images of a run by index, each with `images/000017.png` and a line in `samples.jsonl`.

    Raises:
        SampleSetError: records or images are missing, surplus, altered, truncated or not RGB.
    """

    kind: ClassVar[str] = "images"
    suffix: ClassVar[str] = ".png"

    def image(self, index: int) -> NDArray[np.uint8]:
        """Return the RGB pixels uint8 [H, W, 3] of an image, upright."""
        with open_picture(self._path(index)) as image:
            return np.array(ImageOps.exif_transpose(image))

    def stack(self, indices: Sequence[int]) -> NDArray[np.uint8]:
        """Return the pixels uint8 [N, H, W, 3] of images of one size."""
        return np.stack(map_in_threads(self.image, indices))

    def batches(self, size: int, title: str, indices: Sequence[int] | None = None) -> Iterator[list[int]]:
        """Yield runs of `indices` (None for all), at most `size` images of equal size each, with a progress bar."""
        chosen = self.indices if indices is None else indices
        with make_bar(total=len(chosen), desc=title, unit="image", mininterval=1.0) as bar:
            for _, run in groupby(chosen, lambda index: self.samples[index].size):
                while batch := list(islice(run, size)):
                    yield batch
                    bar.update(len(batch))

    def stacks(self, size: int, title: str) -> Iterator[NDArray[np.uint8]]:
        """Yield the pixels uint8 [N, H, W, 3] of all images, in the batches of `batches`."""
        return map(self.stack, self.batches(size, title))

    def export(self, index: int, target: Path) -> None:
        """Replace `target` by a link to an image's file, or by a copy if links are not possible."""
        target.unlink(missing_ok=True)
        link_or_copy(self._path(index), target)

    def grid(self, indices: Sequence[int]) -> Image.Image:
        """Return images of one size in rows of two, or a single image, as one picture; an empty cell is black.

        Raises:
            ValueError: the images have several sizes.
        """
        sizes = {self.samples[index].size for index in indices}
        if len(sizes) > 1:
            raise ValueError(f"images {list(indices)} have several sizes: {sorted(sizes)}")
        [(width, height)] = sizes
        picture = Image.new("RGB", (width * min(len(indices), 2), height * -(-len(indices) // 2)))
        for cell, index in enumerate(indices):
            picture.paste(Image.fromarray(self.image(index)), (cell % 2 * width, cell // 2 * height))
        return picture

    def _checked(self, sample: Sample) -> Sample:
        return replace(sample, size=read_size(self._path(sample.index), self._read(sample)))


def read_size(path: Path, data: bytes, *, decode: bool = False) -> tuple[int, int]:
    """Return width and height of an image file with content `data`.

    `decode` also checks that all pixels are readable, and returns the size of the upright image.

    Raises:
        SampleSetError: the content is not an image, is truncated, has too many pixels, or is not 8-bit RGB without
            transparency.
    """
    with open_picture(path, data) as image:
        mode, flaw, size = image.mode, find_flaw(image), image.size
        if decode and mode == "RGB" and flaw is None:
            image.load()
            size = size[::-1] if find_orientation(image) > 4 else size
    if mode != "RGB":
        raise SampleSetError(f"{path} has mode {mode}: 8-bit RGB is needed")
    if flaw is not None:
        raise SampleSetError(f"{path} {flaw}: 8-bit RGB is needed")
    return size
