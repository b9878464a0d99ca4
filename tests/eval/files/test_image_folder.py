"""Folders that other programs made: scored by `python -m kvbench.eval`, refused in one line when they cannot be."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kvbench.eval.__main__ import main
from kvbench.eval.distribution.dataset import Pictures
from kvbench.eval.files.image_folder import PlainFolder, open_pair
from kvbench.eval.files.samples import SampleSetError
from kvbench.eval.paired.psnr import decibels
from kvbench.eval.registry import describe_metrics
from kvbench.prompts.files import PromptFile
from tests.eval.files.test_pictures import claim_size

PIXELS = np.random.default_rng(0).integers(0, 256, (4, 16, 16, 3)).astype(np.uint8)


def folder(path: Path, pixels: np.ndarray = PIXELS, names: str = "image {}.png") -> Path:
    path.mkdir()
    for index, image in enumerate(pixels):
        Image.fromarray(image).save(path / names.format(index))
    return path


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return folder(tmp_path / "ours", PIXELS // 2 * 2), folder(tmp_path / "theirs")


def test_two_folders_are_paired_by_name(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = pair
    (theirs / "samples.jsonl").touch()  # a run folder and another one: both are folders of images
    errors = [np.square(a.astype(float) // 2 * 2 - a).mean() for a in PIXELS.astype(int)]
    expected = decibels(np.array(errors)).mean()
    assert main(["psnr,ssim", str(ours), str(theirs)]) == 0
    rows = [re.split(" {2,}", line) for line in capsys.readouterr().out.splitlines()]
    [psnr] = (row for row in rows if row[0] == "psnr ↑")
    low, high = map(float, psnr[2].split(" .. "))
    assert [psnr[1], psnr[3]] == [f"{expected:.2f} dB", "4"]
    assert low < expected < high
    assert "ssim ↑" in [row[0] for row in rows]


def test_results_are_written_and_other_containers_read(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    folder(run / "images", names="{:06d}.webp")
    assert main(["psnr", str(run), str(run), "--out", str(tmp_path / "out")]) == 0
    record = json.loads((tmp_path / "out" / "psnr-uint8.json").read_text())
    assert record["scores"]["n_identical"]["value"] == 4


def test_without_a_file_of_prompts(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    images, reference = open_pair(*pair)
    assert {sample.prompt for side in (images, reference) for sample in side.samples.values()} == {""}
    assert len(set(images.clusters)) == 4  # each is its own cluster
    numbers = folder(pair[0].parent / "numbers", names="{}.png")
    (numbers.parent / "weights").mkdir()
    for name in ("ViT-L-14.pt", "HPS_v2.1_compressed.pt"):
        (numbers.parent / "weights" / name).touch()
    path = f"path={numbers.parent / 'weights' / 'ViT-L-14.pt'}"
    assert main(["clip_score", str(numbers), "--set", path]) == 1  # nothing is computed
    assert "clip_score skipped: the images have no prompts" in capsys.readouterr().out


def test_names_are_in_natural_order(tmp_path: Path) -> None:
    names = ["1", "02", "2", "9b", "9b2", "9b10", "10", "a", "a1", "a11"]
    images = tmp_path / "images"
    images.mkdir()
    for level, name in reversed(list(enumerate(names))):
        Image.new("RGB", (8, 8), (level, 0, 0)).save(images / f"{name}.png")
    (tmp_path / "prompts.txt").write_text("\n".join(names))
    read = PlainFolder(images, tmp_path / "prompts.txt")
    assert [int(read.image(index)[0, 0, 0]) for index in read.indices] == list(range(10))
    assert read.clusters == names


def test_metrics_without_their_weights(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([",".join(describe_metrics()), *map(str, pair)]) == 0
    out = capsys.readouterr().out
    assert {line.split()[1] for line in out.splitlines() if ": " in line} <= {"ok:", "skipped:"}
    assert "psnr " in out


def refuse(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one line with which the command ends."""
    assert main([*map(str, words)]) == 1
    out, line = capsys.readouterr()
    assert (out, line.startswith("error: "), line.count("\n")) == ("", True, 1)
    return line.removeprefix("error: ")


def put(images: Path, name: str, content: Image.Image | bytes | int | None) -> None:
    """Put an image or bytes in the place of a file, cut it, or take away all files of a pattern."""
    if isinstance(content, Image.Image):
        content.save(images / name)
    elif isinstance(content, int):
        (images / name).write_bytes((images / name).read_bytes()[:content])
    elif isinstance(content, bytes):
        (images / name).write_bytes(content)
    else:
        for path in images.glob(name):
            path.unlink()


FIRST = Image.fromarray(PIXELS[0])
DEEP, CLEAR = claim_size(16, 16, 16), claim_size(16, 16, 8, bytes(6))


@pytest.mark.parametrize(
    ("side", "name", "content", "message"),
    [
        (0, "image 0.png", FIRST.convert("L"), "has mode L: 8-bit RGB is needed"),
        (0, "image 1.png", 4, "image 1.png cannot be read: its content has no known format\n"),
        (1, "image 1.png", -40, "image 1.png cannot be read: image file is truncated"),
        (0, "image 3.png", DEEP, "image 3.png has more than 8 bits per channel"),
        (1, "image 3.png", CLEAR, "image 3.png has transparency"),
        (0, "image 2.png", None, "lacks 1 images of the other folder: image 2"),
        (1, "another.png", FIRST, "lacks 1 images of the other folder: another"),
        (0, "image 0.png", FIRST.crop((0, 0, 16, 8)), "sample 0 has size (16, 8) and (16, 16)"),
        (1, "image 0.jpg", FIRST, "two images are called image 0"),
        (0, "*", None, "holds no images"),
    ],
)
def test_bad_folders_are_one_line(
    pair: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
    side: int,
    name: str,
    content: object,
    message: str,
) -> None:
    put(pair[side], name, content)
    assert message in refuse(capsys, "psnr", *pair)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fdi"], "fdi: no such metric or group; did you mean fid? choose from fid"),
        (["ssim", "--set", "batch"], "--set batch: NAME=VALUE is needed"),
        (["ssim", "--set", "size=3"], "--set size=3: no such setting; there are ssim.batch, ssim.double"),
        (["ssim", "--set", "batch=x"], "--set batch=x: int is needed, such as 8"),
        (["ssim", "--set", "_target_=os.system"], "--set _target_=os.system: no such setting"),
        (["ssim", "--out", __file__], "is not a folder); name another folder"),
        (["psnr", "--out", "/proc/kvbench"], "--out /proc/kvbench cannot be written to ("),
        (["psnr", "--device", "tpu9"], "device=tpu9: torch has no such device; give cpu or cuda"),
        (["psnr"], "nowhere: no such folder"),
    ],
)
def test_bad_arguments_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    metric, *more = arguments
    assert message in refuse(capsys, metric, "nowhere", *more)  # which is looked for at last


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("few.txt", "one\n", "holds 1 prompts for 4 images"),
        ("bad.jsonl", "{\n{\n{\n{", "not a file of prompts"),
        ("half.jsonl", r'{"prompt": "a \ud83d"}', r"line 1: \\ud83d is half of a surrogate pair"),
        ("/dev/zero", None, r"^/dev/zero: not a file of prompts \(.* not a regular file: '/dev/zero'\)$"),
    ],
)
def test_bad_prompts_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str | None, message: str
) -> None:
    images = folder(tmp_path / "images")
    if content is not None:
        (tmp_path / name).write_text(content)
    assert re.search(message, refuse(capsys, "psnr", images, images, "--prompts", tmp_path / name))


# Pictures of the world


PALETTE = Image.new("P", (8, 8))
PALETTE.info["transparency"] = 0


@pytest.mark.parametrize(
    ("content", "message"), [(PALETTE, "transparency"), (DEEP, "8 bits"), (b"no image", "cannot be read")]
)
def test_pictures_that_would_change_are_refused(
    tmp_path: Path, content: Image.Image | bytes, message: str
) -> None:
    put(tmp_path, "odd.png", content)
    with pytest.raises(SampleSetError, match=f"odd.png.*{message}"):
        Pictures(tmp_path)


def test_pictures_come_in_order_and_at_most_so_many_of_one_size(tmp_path: Path) -> None:
    images = folder(tmp_path / "real")
    Image.fromarray(PIXELS[1][:8]).save(images / "image 1.png")
    Image.fromarray(PIXELS[0, :, :, 0]).save(images / "image 4.PNG")  # grey
    Image.new("CMYK", (5, 5)).save(images / "image 5.jpg")
    grey, white = PIXELS[0, :, :, :1].repeat(3, 2), np.full((5, 5, 3), 255)
    expected = [[PIXELS[0]], [PIXELS[1][:8]], [PIXELS[2], PIXELS[3]], [grey], [white]]
    for found, wanted in zip(Pictures(images).stacks(2, ""), expected, strict=True):
        assert (found == np.stack(wanted)).all()


def test_turned_images_are_read_upright_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pixels = np.ascontiguousarray(PIXELS[:, :12])
    upright, tagged = folder(tmp_path / "upright", pixels), tmp_path / "tagged"
    tagged.mkdir()
    turns = {1: lambda x: x, 3: lambda x: np.rot90(x, 2), 6: np.rot90, 8: lambda x: np.rot90(x, -1)}
    for index, (orientation, turn) in enumerate(turns.items()):
        exif = Image.Exif()
        exif[0x0112] = orientation
        stored = Image.fromarray(np.ascontiguousarray(turn(pixels[index])))
        stored.save(tagged / f"image {index}.png", exif=exif)
    for kind in (PlainFolder, Pictures):
        caplog.clear()
        read, plain = kind(tagged), kind(upright)
        assert [(read.image(i) == pixels[i]).all() for i in read.indices] == [True] * 4
        assert {sample.size for sample in read.samples.values()} == {(16, 12)}
        assert read.digest != plain.digest
        [line] = caplog.messages
        assert "3 images are rotated by their EXIF orientation: image 1.png, image 2.png, image 3.png" in line


def test_what_is_not_read_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    images = folder(tmp_path / "images")
    for name in (".hidden", "a.tif", "b.gif"):
        (images / name).write_bytes(b"")
    (images / "deeper").mkdir()
    for kind in (PlainFolder, Pictures):
        caplog.clear()
        kind(images)
        [line] = caplog.messages
        assert "3 entries are not images (.bmp, .jpeg, .jpg, .png, .webp)" in line
        assert line.endswith("are not read: a.tif, b.gif, deeper/")


def test_prompts_are_read_as_a_run_reads_them(tmp_path: Path) -> None:
    texts = ["a red\u2028circle", "a blue\x85square", "x\x0cy", "z"]
    lines = [json.dumps({"prompt": text, "tag": "colors"}, ensure_ascii=False) for text in texts]
    images = folder(tmp_path / "images")
    for name, rows, mark, end in (("a.txt", texts, b"\xef\xbb\xbf", "\n"), ("a.jsonl", lines, b"", "\r\n")):
        path = tmp_path / name
        path.write_bytes(mark + end.join([*rows, ""]).encode())
        read = PlainFolder(images, path)
        assert read.clusters == [prompt.text for prompt in PromptFile(str(path)).load()] == texts
    assert read.meta(2)["tag"] == "colors"
