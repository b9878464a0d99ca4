"""Image files, opened within a bound on their pixels that is checked before anything is decoded."""

import contextlib
import io
import struct
import threading
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path

from PIL import ExifTags, Image, UnidentifiedImageError

from kvbench.eval.files.samples import SampleSetError

MAX_PIXELS = 2**26
"""Largest number of pixels of an image, 8192 x 8192."""
DAMAGE_ERRORS = (OSError, ValueError, TypeError, SyntaxError, EOFError, struct.error, zlib.error)
"""Errors of Pillow for damaged files."""
_OPENING = threading.Lock()  # filters of warnings belong to the process


@contextlib.contextmanager
def open_picture(path: Path, data: bytes | None = None) -> Iterator[Image.Image]:
    """Open an image file, of which only the header is read; `data` is its content if it is known.

    Raises:
        SampleSetError: the file is not an image, has more than `MAX_PIXELS` pixels, or cannot be decoded in the block.
    """
    try:
        with _read_header(path if data is None else io.BytesIO(data)) as image:
            width, height = image.size
            if width * height <= MAX_PIXELS:
                yield image
                return
        size = f"has {width} x {height} pixels"
    except Image.DecompressionBombError:
        size = "has too many pixels"
    except UnidentifiedImageError as error:  # its text has the address of an object
        raise SampleSetError(f"{path} is not an image: its content has no known format") from error
    except DAMAGE_ERRORS as error:
        raise SampleSetError(f"{path} is not an image: {_first_line(error)}") from error
    raise SampleSetError(f"{path} {size}: an image may have {MAX_PIXELS} (8192 x 8192); reduce or remove it")


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


def _read_header(source: Path | io.BytesIO) -> Image.Image:
    """Open an image without Pillow's warning about its size."""
    with _OPENING, warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        return Image.open(source)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
