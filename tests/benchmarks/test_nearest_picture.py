"""Shares of images nearest to their prompt's picture, on images of which the answer is known."""

import json
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.__main__ import main
from kvbench.training.pictures import Variant, draw_variant, open_picture
from tests.support.pictures import write_package

CAPTIONS = ("red ball on blue", "red box on blue", "blue hat on pink", "red bar on white")


def write_run(folder: Path, package: Path, drawn: tuple[str, ...]) -> Path:
    """A run of `CAPTIONS`, whose images are drawings of other captions."""
    pictures = {
        line["name"].lower(): line["image"] for line in json.loads((package / "emoji.json").read_text())
    }
    run = folder / "infinity_emoji" / "full-0"
    (run / "images").mkdir(parents=True)
    records = []
    for index, (caption, shown) in enumerate(zip(CAPTIONS, drawn, strict=True)):
        picture = open_picture(package, pictures[shown])
        pixels = draw_variant(picture, caption.split()[-1], Variant(index % 2, index // 2, 1))
        Image.fromarray(pixels).save(run / f"images/{index:06}.png")
        records.append({"index": index, "prompt": caption, "sha256": ""})
    (run / "samples.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return run


@pytest.mark.parametrize(
    ("drawn", "share"),
    [
        (("red ball", "red box", "blue hat", "red bar"), "1.000"),
        (("red ball", "red box", "red hat", "red bar"), "0.750"),
    ],
)
def test_images_are_counted_whose_picture_is_nearest(
    drawn: tuple[str, ...], share: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = write_package(tmp_path / "package")
    main(["nearest_picture", "--runs", str(write_run(tmp_path, package, drawn)), "--pictures", str(package)])
    row = capsys.readouterr().out.splitlines()[-1].split()
    assert row[:3] == ["full-0", "4", share]


def test_runs_and_pictures_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    package = write_package(tmp_path / "package")
    run = write_run(tmp_path, package, ("red ball",) * 4)
    for words, why in (
        (["--runs", str(run)], "must name runs and a folder"),
        (["--runs", str(run), "--pictures", str(tmp_path)], r"error: .*emoji\.json"),
        (["--runs", str(run / "images"), "--pictures", str(package)], "has no samples"),
    ):
        with pytest.raises(SystemExit, match=why):
            main(["nearest_picture", *words])
    (run / "images/000001.png").unlink()
    with pytest.raises(SystemExit, match=r"000001\.png"):
        main(["nearest_picture", "--runs", str(run), "--pictures", str(package)])
