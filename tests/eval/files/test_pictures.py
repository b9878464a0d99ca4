"""Bound on the pixels of an image, at every door through which images come in, and inputs that never end."""

import io
import json
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kvbench.core.files import hash_content
from kvbench.dashboard.page import render_bundle
from kvbench.eval.distribution.dataset import Packed, Pictures
from kvbench.eval.files.image_folder import PlainFolder
from kvbench.eval.files.images import ImageSet
from kvbench.eval.files.pictures import MAX_PIXELS, open_picture
from kvbench.eval.files.samples import SampleSetError
from tests.support.results import made_up
from tests.support.run_folders import paint, write_run

SIZES = ((8193, 8192), (13000, 13000), (2**31 - 1, 2**31 - 1))
"""Just above the bound, where Pillow warns, and where it raises errors."""


def claim_size(width: int, height: int, depth: int = 8, transparent: bytes = b"") -> bytes:
    """A small PNG in RGB whose header claims a size and bits per channel; `transparent` is a colour that is."""
    header = struct.pack(">IIBBBBB", width, height, depth, 2, 0, 0, 0)
    colour = ((b"tRNS", transparent),) if transparent else ()
    parts = ((b"IHDR", header), *colour, (b"IDAT", zlib.compress(bytes(2000))), (b"IEND", b""))
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def open_run(folder: Path) -> object:
    content = (folder / "0.png").read_bytes()
    (folder / "images").mkdir()
    (folder / "0.png").rename(folder / "images/000000.png")
    record = {"index": 0, "seed": 0, "prompt": "a", "sha256": hash_content(content)}
    (folder / "samples.jsonl").write_text(json.dumps(record) + "\n")
    return ImageSet(folder)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("door", [open_run, Pictures, PlainFolder])
def test_too_many_pixels_are_one_line_without_a_warning(
    tmp_path: Path, size: tuple[int, int], door: Callable[[Path], object]
) -> None:
    (tmp_path / "0.png").write_bytes(claim_size(*size))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(SampleSetError, match=rf"^\S+0\.png has .* pixels: .* may have {MAX_PIXELS}.*$"):
            door(tmp_path)


def test_an_image_at_the_bound_is_opened_and_a_damaged_one_is_one_line(tmp_path: Path) -> None:
    assert MAX_PIXELS == 8192**2
    path = tmp_path / "0.png"
    with open_picture(path, claim_size(8192, 8192)) as image:
        assert image.size == (8192, 8192)
    for content in (b"", b"\x89PNG\r\n\x1a\n", claim_size(64, 64), paint(1)[:50]):
        with (
            pytest.raises(SampleSetError, match=r"^\S+0\.png cannot be read: .*$"),
            open_picture(path, content) as image,
        ):
            image.load()


def test_a_page_with_pictures_leaves_out_a_large_one(tmp_path: Path) -> None:
    write_run(tmp_path, made_up("full", 1.0, {}, run="full-0", n=2), [("a", {}, claim_size(13000, 13000))])
    assert "data:image/png" not in render_bundle(tmp_path)


def test_an_array_of_large_images_is_refused_before_it_is_read(tmp_path: Path) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "|u1", "fortran_order": False, "shape": (1, 20000, 20000, 3)}
    )
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("arr_0.npy", header.getvalue())
    with pytest.raises(SampleSetError, match="67108864 pixels an image"):
        Packed(tmp_path / "a.npz")


EPS = (
    b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 24 24\n%%EndComments\n0 0 24 24 rectfill\nshowpage\n%%EOF\n"
)
"""PostScript, for which Pillow starts a program."""


def encode(form: str, **more: object) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.full((8, 8, 3), 90, np.uint8)).save(buffer, form, **more)
    return buffer.getvalue()


OTHERS = {"EPS": EPS} | {form: encode(form) for form in ("GIF", "TIFF", "PPM", "ICO", "JPEG2000")}
"""Formats that are not opened."""


@pytest.mark.parametrize(
    ("form", "door"), [*((form, PlainFolder) for form in OTHERS), ("EPS", open_run), ("EPS", Pictures)]
)
def test_a_picture_starts_no_program_and_no_reader_of_another_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, door: Callable[[Path], object]
) -> None:
    Image.init()
    _, accepts = Image.OPEN[form]
    monkeypatch.setitem(Image.OPEN, form, (lambda *_: pytest.fail("its reader is started"), accepts))
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("a program is started"))
    (tmp_path / "0.png").write_bytes(OTHERS[form])
    named = f"is {form}; PNG, JPEG, WEBP, BMP are read, convert it"
    with pytest.raises(SampleSetError, match=rf"0\.png cannot be read: its content {named}$"):
        door(tmp_path)


@pytest.mark.parametrize("form", ["PNG", "WEBP"])
def test_an_animated_picture_is_not_compared_by_its_first_frame(tmp_path: Path, form: str) -> None:
    frames = [Image.new("RGB", (8, 8), (level, 0, 0)) for level in (40, 80)]
    (tmp_path / "0.png").write_bytes(encode(form, save_all=True, append_images=frames))
    for door in (PlainFolder, Pictures):
        with pytest.raises(SampleSetError, match=r"0\.png is animated: save one of its 3 frames"):
            door(tmp_path)
    with open_picture(tmp_path / "0.png", encode("MPO", save_all=True, append_images=frames)) as photograph:
        assert abs(int(np.array(photograph)[0, 0, 0]) - 90) <= 2  # a phone's file begins with it
