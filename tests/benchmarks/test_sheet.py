"""Pictures of samples of several runs, on images of one colour."""

from pathlib import Path

import pytest
from PIL import Image

from benchmarks.__main__ import main
from benchmarks.sheet import GAP, LABEL

COLOURS = {"full-0": [(250, 0, 0), (0, 250, 0)], "heatkv-0.1-ab": [(0, 0, 250), (90, 90, 0)]}


def write_runs(folder: Path, side: int = 5) -> list[str]:
    for run, colours in COLOURS.items():
        (folder / run / "images").mkdir(parents=True)
        for number, colour in enumerate(colours):
            Image.new("RGB", (side, 4), colour).save(folder / run / f"images/{number:06}.png")
    return [str(folder / run) for run in COLOURS]


@pytest.mark.parametrize("scale", [1, 3])
def test_samples_have_a_column_and_runs_a_row(scale: int, tmp_path: Path) -> None:
    png = tmp_path / "sheet.png"
    main(
        [
            "sheet",
            "--runs",
            *write_runs(tmp_path),
            "--samples",
            "1",
            "0",
            "--scale",
            str(scale),
            "--png",
            str(png),
        ]
    )
    with Image.open(png) as sheet:
        assert sheet.size == (10 * scale + GAP, 8 * scale + 2 * LABEL + GAP)
        for row, colours in enumerate(COLOURS.values()):
            top = row * (4 * scale + LABEL + GAP) + LABEL
            for column, colour in enumerate(reversed(colours)):
                left = column * (5 * scale + GAP)
                assert sheet.getpixel((left, top)) == colour
                assert sheet.getpixel((left + 5 * scale - 1, top + 4 * scale - 1)) == colour


def test_missing_samples_and_other_sizes_are_refused(tmp_path: Path) -> None:
    runs, png = write_runs(tmp_path / "a"), str(tmp_path / "sheet.png")
    wider = write_runs(tmp_path / "b", side=6)
    for words, why in (
        (["--runs", *runs, "--samples", "2"], r"error: --runs .*full-0: .*000002\.png"),
        (["--runs", *runs, *wider, "--samples", "0"], r"different sizes \(\(5, 4\), \(6, 4\)\)"),
        (["--runs", *runs], "must name runs, samples and a file"),
    ):
        with pytest.raises(SystemExit, match=why):
            main(["sheet", *words, "--png", png])
    assert not Path(png).exists()
