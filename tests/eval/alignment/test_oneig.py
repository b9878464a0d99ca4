"""OneIG-Bench: the layout for its program, and the tables that it writes."""

import csv
import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kvbench.eval.alignment.oneig import TEXTS_FILE, OneIg
from kvbench.eval.files.images import ImageSet
from kvbench.eval.protocol.compare import compare_runs
from tests.support.image_sets import GOLDEN, make_noise, only, reason

pytestmark = pytest.mark.usefixtures("offline")
STORED = json.loads((GOLDEN / "newer_metrics.json").read_text())["oneig_text"]
READ = [STORED["rows"][start : start + 4] for start in range(0, 24, 4)]
"""Six texts, each as read from four images."""
WRITTEN = {
    "alignment": ("alignment", {"anime_000": 0.25, "anime_001": 1.0, "object_000": 0.625}),
    "style": ("style", {"001": 0.5}),
    "reasoning": ("reasoning", {"000": 0.375, "001": ""}),
    "diversity": (
        "total average",
        {"anime_000": 0.5, "anime_001": 0.25, "object_000": 0.125, "reasoning_000": 1},
    ),
}
"""By part: the column of its total, and the score of each prompt."""
PROMPTS = (("anime", "000"), ("anime", "001"), ("object", "000"), ("reasoning", "000"))


def make_run(folder: Path, prompts: tuple[tuple[str, str], ...] = PROMPTS, copies: int = 4) -> ImageSet:
    metas = [{"oneig_class": one, "oneig_id": number} for one, number in prompts for _ in range(copies)]
    return make_noise(folder, metas, [" ".join(meta.values()) for meta in metas], size=8)


def write_table(path: Path, heading: str, rows: Mapping[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["", heading], *rows.items()])


def write_part(images: ImageSet, part: str, column: str, rows: Mapping[str, object], total: float) -> None:
    folder = images.folder / "oneig" / "results"
    write_table(folder / f"{part}_prompt_score_EN_2026-11-25.csv", "kvbench", rows)
    write_table(folder / f"{part}_score_EN_2026-11-25.csv", column, {"kvbench": total})


def write_all(images: ImageSet) -> None:
    for part, (column, rows) in WRITTEN.items():
        write_part(images, part, column, rows, np.mean([value for value in rows.values() if value != ""]))


def write_texts(images: ImageSet, total: float = STORED["text_score"]) -> None:
    names = ("edit_distance", "matched_words", "words")
    rows = {}
    for number, images_of_one in enumerate(READ):
        distances, matched, words = (np.array([row[name] for row in images_of_one]) for name in names)
        rows[f"{number:03d}"] = [
            float(distances.mean()),
            float((distances == 0).mean()),
            float((matched / words).mean()),
        ]
    write_part(images, "text", "text score", rows, total)
    with (images.folder / "oneig" / "results" / TEXTS_FILE).open("w", newline="") as file:
        texts = [[f"{number:03d}", one[0]["truth"]] for number, one in enumerate(READ)]
        csv.writer(file).writerows([["id", "text_content"], *texts, ["006", "another"]])


@pytest.mark.parametrize(("copies", "columns", "rows"), [(1, 1, 1), (2, 2, 1), (3, 2, 2), (4, 2, 2)])
def test_the_program_cuts_our_images_out_again(copies: int, columns: int, rows: int, tmp_path: Path) -> None:
    images = make_run(tmp_path / "run", copies=copies)
    why = reason(OneIg(), "skipped", images)
    assert f'IMAGE_GRIDS=("{columns},{rows}")' in why
    assert why.endswith("then set eval.oneig.scores=true")
    folder = images.folder / "oneig" / "images"
    paths = [folder / one / "kvbench" / f"{number}.webp" for one, number in PROMPTS]
    assert sorted(folder.rglob("*.webp")) == sorted(paths)
    for number, path in enumerate(paths):
        with Image.open(path) as picture:
            width, height = picture.width // columns, picture.height // rows
            boxes = [(x * width, y * height) for y in range(rows) for x in range(columns)]
            cells = [np.array(picture.crop((x, y, x + width, y + height))) for x, y in boxes]
        for copy in range(copies):
            assert (cells[copy] == images.image(number * copies + copy)).all()
        assert not any(cell.any() for cell in cells[copies:])
    assert "is not there yet" in reason(OneIg(scores=True), "failed", images)


def test_scores_are_those_of_the_program(tmp_path: Path) -> None:
    images = make_run(tmp_path / "run")
    write_all(images)
    result = only(OneIg(scores=True), images)
    assert {name: (score.value, score.n) for name, score in result.scores.items()} == {
        "oneig_alignment[official]": (pytest.approx(1.875 / 3), 3),
        "oneig_reasoning[official]": (0.375, 1),
        "oneig_style[official]": (0.5, 1),
        "oneig_diversity[official]": (pytest.approx(1.875 / 4), 4),
    }
    assert result.samples["index"] == [0, 4, 8, 12]
    assert result.samples["oneig_alignment[official]"][:3] == [0.25, 1, 0.625]
    assert math.isnan(result.samples["oneig_alignment[official]"][3])
    assert result.reason == "no scores of text"
    result.save(images.folder / "metrics")
    differences = compare_runs(images.folder, images.folder)
    assert {(name, one.value) for name, one in differences.items()} == {(name, 0) for name in result.scores}


def test_the_score_of_texts_is_that_of_the_program(tmp_path: Path) -> None:
    images = make_run(tmp_path / "run", tuple(("text", f"{number:03d}") for number in range(6)))
    write_texts(images)
    result = only(OneIg(scores=True), images)
    [score] = result.scores.values()
    assert score.value == pytest.approx(STORED["text_score"], abs=1e-12)
    assert np.mean(result.samples["edit_distance"]) == pytest.approx(STORED["ED"])
    assert np.mean(result.samples["complete"]) == pytest.approx(STORED["CR"])
    low, high = score.ci95
    assert low < score.value < high
    result.save(images.folder / "metrics")
    difference = compare_runs(images.folder, images.folder)["oneig_text[official]"]
    assert (difference.value, difference.interval) == (0, (0, 0))
    write_texts(images, total=0.9)
    assert "the prompts' text gives 0.994" in reason(OneIg(scores=True), "failed", images)
    (images.folder / "oneig" / "results" / TEXTS_FILE).write_text("id,text_content\n000,one\n")
    assert "no text of prompt 001" in reason(OneIg(scores=True), "failed", images)
    (images.folder / "oneig" / "results" / TEXTS_FILE).unlink()
    assert "copy scripts/text/text_content.csv" in reason(OneIg(scores=True), "failed", images)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            {"anime_000": 1, "anime_001": 1, "object_000": 1, "human_000": 1},
            "human_000 is not a prompt of this run",
        ),
        ({"anime_000": 1, "anime_001": "", "object_000": 1}, "no score of anime_001 (1 of 3 are missing)"),
        ({"anime_000": 1, "anime_001": 0, "object_000": 0}, "the program's total is 0.5"),
    ],
)
def test_other_tables_are_refused(rows: dict[str, object], message: str, tmp_path: Path) -> None:
    images = make_run(tmp_path / "run")
    write_part(images, "alignment", "alignment", rows, 0.5)
    assert message in reason(OneIg(scores=True), "failed", images)


def test_other_folders_and_runs_are_refused(tmp_path: Path) -> None:
    images = make_run(tmp_path / "run")
    folder = images.folder / "oneig" / "results"
    folder.mkdir(parents=True)
    assert "no table of scores" in reason(OneIg(scores=True), "failed", images)
    write_part(images, "reasoning", "score", {"000": 1}, 1)
    assert "no column 'reasoning'" in reason(OneIg(scores=True), "failed", images)
    write_table(folder / "reasoning_score_EN_2026-11-26.csv", "reasoning", {})
    assert "leave one of them" in reason(OneIg(scores=True), "failed", images)
    assert "use prompts=oneig" in reason(OneIg(), "skipped", make_noise(tmp_path / "other", [{}] * 2))
    metas = [{"oneig_class": "text", "oneig_id": number} for number in ("000", "000", "001")]
    assert "not [1, 2] (prompts.per_prompt)" in reason(
        OneIg(), "failed", make_noise(tmp_path / "some", metas)
    )
