"""UniGenBench++: the layout for its program, and the table that it writes."""

import csv
import json
from pathlib import Path

import pytest

from kvbench.eval.alignment.unigenbench import UniGenBench, layout
from kvbench.eval.files.images import ImageSet
from kvbench.eval.protocol.compare import compare_runs
from tests.support.image_sets import GOLDEN, make_noise, only, reason

pytestmark = pytest.mark.usefixtures("offline")
STORED = json.loads((GOLDEN / "newer_metrics.json").read_text())["unigenbench"]
METRIC = "unigenbench[qwen2.5-vl-72b]"


def make_run(folder: Path) -> ImageSet:
    metas = [{"unigenbench_index": str(9 - index // 4)} for index in range(12)]
    return make_noise(folder, metas, [f"prompt {index // 4}" for index in range(12)], size=8)


def write_table(images: ImageSet, rows: list[dict[str, str]]) -> Path:
    path = images.folder / "unigenbench" / "results.csv"
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["index", "testpoint", "result_json", "img_path"])
        writer.writeheader()
        for name, row in zip(layout(images).values(), rows, strict=False):
            writer.writerow({"index": 0, **row, "img_path": f"/elsewhere/images/{name}.png"})
    return path


def test_images_lie_where_the_program_looks(tmp_path: Path) -> None:
    images = make_run(tmp_path / "run")
    assert "--data_path" in reason(UniGenBench(), "skipped", images)
    folder = images.folder / "unigenbench" / "images"
    assert {path.name for path in folder.iterdir()} == {f"{n}_{k}.png" for n in (9, 8, 7) for k in range(4)}
    assert (folder / "8_1.png").read_bytes() == (images.folder / "images" / "000005.png").read_bytes()
    assert "is not there yet" in reason(UniGenBench(scores=True), "failed", images)


def test_scores_are_those_of_the_program(tmp_path: Path) -> None:
    images = make_run(tmp_path / "run")
    write_table(images, STORED["rows"])
    result = only(UniGenBench(scores=True), images)
    counts = {name.strip(): each for name, each in STORED["result"]["primary_dimensions"].items()}
    shares = {name: 100 * each["correct"] / each["total"] for name, each in counts.items()}
    found = {name: score.value for name, score in result.scores.items()}
    assert found.pop(METRIC) == pytest.approx(sum(shares.values()) / len(shares))
    assert found == pytest.approx({f"{METRIC}/{name}": share for name, share in shares.items()})
    assert [result.scores[f"{METRIC}/{name}"].n for name in counts] == [
        each["total"] for each in counts.values()
    ]
    assert result.reason == "answers on 1 images could not be read"
    result.save(images.folder / "metrics")
    difference = compare_runs(images.folder, images.folder)[METRIC]
    assert (difference.value, difference.interval) == (0, (0, 0))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (STORED["rows"][:5], "no answer on 8_1.png .7 are missing"),
        ([{"testpoint": "['Taste']", "result_json": '{"score": [1]}'}] * 12, "Taste is no dimension"),
        ([{"testpoint": "['Style']", "result_json": '{"score": [1, 0]}'}] * 12, "2 scores for 1 test points"),
        ([{"testpoint": "['Style']", "result_json": "null"}] * 12, "no answer on any image"),
    ],
)
def test_other_tables_are_refused(rows: list[dict[str, str]], message: str, tmp_path: Path) -> None:
    images = make_run(tmp_path / "run")
    write_table(images, rows)
    why = reason(UniGenBench(scores=True), "failed", images)
    assert message.replace(".7", "(7") in why


def test_other_prompts_and_numbers_of_images_are_refused(tmp_path: Path) -> None:
    assert "use prompts=unigenbench" in reason(
        UniGenBench(), "skipped", make_noise(tmp_path / "other", [{}] * 2)
    )
    three = make_noise(tmp_path / "three", [{"unigenbench_index": "1"}] * 3)
    assert "4 images of every prompt, there are 3 of prompt 1" in reason(UniGenBench(), "failed", three)
