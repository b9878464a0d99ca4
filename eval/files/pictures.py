"""Image files of a few formats, opened within a bound on their pixels that is checked before anything is decoded."""

import contextlib
import io
import struct
import threading
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from PIL import ExifTags, Image, UnidentifiedImageError

from kvbench.core.files import open_file
from kvbench.eval.files.samples import SampleSetError

FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
"""Pillow's names of accepted formats; an MPO file counts as JPEG. Pillow may start programs to read other formats."""
PREFIX_BYTES = 16
"""Number of first bytes by which Pillow recognises formats."""
MAX_PIXELS = 2**26
"""Maximum number of pixels of an image, 8192 x 8192."""
BOUND = f": an image may have {MAX_PIXELS} (8192 x 8192); reduce or remove it"
DAMAGE_ERRORS = (OSError, ValueError, TypeError, SyntaxError, EOFError, struct.error, zlib.error)
"""Errors that Pillow raises for damaged files."""
_OPENING = threading.Lock()  # filters of warnings are shared by all threads


@contextlib.contextmanager
def open_picture(path: Path, data: bytes | None = None) -> Iterator[Image.Image]:
    """Open an image file and read only its header; `data` is the file's content, None to read the file.

    Raises:
        SampleSetError: the file is not an image in one of `FORMATS`, is animated, has more than `MAX_PIXELS` pixels, or
            cannot be decoded in the block.
    """
    try:
        with open_file(path) if data is None else io.BytesIO(data) as source, _read_header(source) as image:
            width, height = image.size
            # MPO begins with the photograph
            frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)
            if frames == 1 and width * height <= MAX_PIXELS:
                yield image
                return
        flaw = f"has {width} x {height} pixels{BOUND}"
        if frames > 1:
            flaw = f"is animated: save one of its {frames} frames as an image"
    except SampleSetError:  # raised for another picture, which the block opened
        raise
    except Image.DecompressionBombError:
        flaw = f"has too many pixels{BOUND}"
    except UnidentifiedImageError as error:
        raise SampleSetError(f"{path} cannot be read: its content {error}") from error
    except DAMAGE_ERRORS as error:
        raise SampleSetError(f"{path} cannot be read: {_first_line(error)}") from error
    raise SampleSetError(f"{path} {flaw}")


def find_orientation(image: Image.Image) -> int:
    """Return the EXIF orientation of an opened image, from 1 (upright) to 8; 5 to 8 exchange width and height."""
    orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    return orientation if orientation in range(1, 9) else 1


def find_flaw(image: Image.Image) -> str | None:
    """Describe the loss of an opened image when converted to 8-bit RGB, or return None.

    Pillow silently drops transparency and reads 16-bit RGB of PNG files as 8 bits.
    """
    if "transparency" in image.info or {"A", "a"} & set(image.getbands()):
        return "has transparency"
    tiles = getattr(image, "tile", ())
    deep = image.mode.startswith(("I", "F")) or any(";16B" in str(tile) for tile in tiles)
    return "has more than 8 bits per channel" if deep else None


def _read_header(source: IO[bytes]) -> Image.Image:
    """Open an image without Pillow's warning about its size; an UnidentifiedImageError describes other contents."""
    with _OPENING, warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        try:
            return Image.open(source, formats=FORMATS)
        except UnidentifiedImageError:  # its message contains an address in memory
            source.seek(0)
            raise UnidentifiedImageError(_describe_format(source.read(PREFIX_BYTES))) from None


def _describe_format(prefix: bytes) -> str:
    """Describe unsupported content by its first bytes, for an error."""
    Image.init()
    padded = prefix.ljust(PREFIX_BYTES, b"\0")
    tests = [(name, test) for name, (_, test) in Image.OPEN.items() if test is not None]
    kind = next((name for name, test in tests if test(padded) is True), None)
    return f"is {kind}; {', '.join(FORMATS)} are read, convert it" if kind else "has no known format"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
