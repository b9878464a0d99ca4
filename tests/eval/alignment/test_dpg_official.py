"""DPG's official program: what it would cut out of our pictures, and its lines as its source writes them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kvbench.eval.alignment.dpg_official import DpgOfficial
from kvbench.eval.files.images import ImageSet
from kvbench.eval.protocol.base import evaluate
from tests.support.image_sets import make_noise, only, reason

SCORES = {"b, 1": [1.0, 0.5, 2 / 3, 0.0], "a": [0.25, 1.0, 1.0, 1.0], "c": [0.0, 0.0, 1e-05, 1 / 3]}


def made(folder: Path, items: Sequence[str] = ("b, 1", "a", "c"), copies: int = 4) -> ImageSet:
    metas = [{"item_id": item} for item in items for _ in range(copies)]
    return make_noise(folder, metas, [f"about {meta['item_id']}" for meta in metas])


def written(scores: Mapping[str, Sequence[float]], *, done: bool = True) -> str:
    """The text that the program leaves, by its own statements."""
    text = ""
    for item, each in scores.items():
        image_path, average_score = f"/some, where/images/{item}.png", sum(each) / len(each)
        text += image_path + ", " + ", ".join(str(i) for i in each) + ", " + str(average_score) + "\n"
    mean_dpg_score = np.mean([sum(each) / len(each) for each in scores.values()])
    output = "Model: images\n" + "L1 category scores:\n"
    output += f"\tentity: {np.mean([1.0, 0.0]) * 100}\n" + f"\trelation: {np.mean([1.0]) * 100}\n"
    output += "L2 category scores:\n" + f"\tentity - whole: {12.5}\n"
    output += "Image path: /some, where/images\n" + "Save results to: results.txt\n"
    output += f"DPG-Bench score: {mean_dpg_score * 100}"
    return text + (output + "\n" if done else "")


def judged(folder: Path, text: str) -> ImageSet:
    """A run beside the text that the program left."""
    (folder / "run" / "dpg_official").mkdir(parents=True)
    (folder / "run" / "dpg_official" / "results.txt").write_text(text)
    return made(folder / "run")


@pytest.mark.parametrize("copies", [1, 2, 3, 4])
def test_the_program_cuts_our_images_out_again(copies: int, tmp_path: Path) -> None:
    images = made(tmp_path / "run", copies=copies)
    [skipped] = evaluate([DpgOfficial()], images)
    folder = tmp_path / "run" / "dpg_official"
    assert skipped.status == "skipped"
    assert (
        f"--image-root-path {folder}/images --resolution 40 --pic-num {copies} --res-path {folder}/results.txt"
        in str(skipped.reason)
    )
    assert sorted(path.name for path in (folder / "images").iterdir()) == ["a.png", "b, 1.png", "c.png"]
    crops = [(0, 0, 40, 40), (40, 0, 80, 40), (0, 40, 40, 80), (40, 40, 80, 80)][:copies]
    for number, item in enumerate(("b, 1", "a", "c")):
        with Image.open(folder / "images" / f"{item}.png") as picture:
            for image, crop in enumerate(crops):
                assert (np.array(picture.crop(crop)) == images.image(number * copies + image)).all()
    assert evaluate([DpgOfficial()], images)[0].reason == skipped.reason  # again, over what is there


def test_its_scores_come_in(tmp_path: Path) -> None:
    images = made(tmp_path / "run")
    path = tmp_path / "run" / "dpg_official" / "results.txt"
    assert "is not there yet; with scores=false first" in reason(DpgOfficial(scores=True), "failed", images)
    evaluate([DpgOfficial()], images)
    path.write_text(written(dict(reversed(SCORES.items()))))  # in whatever order
    result = only(DpgOfficial(scores=True), images)
    each = [100 * score for scores in SCORES.values() for score in scores]
    assert result.samples["dpg[official]"] == pytest.approx(each)
    assert result.samples["index"] == images.indices
    assert result.scores["dpg[official]"].value == pytest.approx(np.mean(each))
    assert result.scores["dpg[official]"].n == 3
    values = {name: score.value for name, score in result.scores.items() if "/" in name}
    assert values == {"dpg[official]/entity": 50, "dpg[official]/relation": 100}
    assert result.reason is None
    assert result.save(tmp_path / "metrics").name == "dpg-official.json"


def test_the_item_that_the_program_drops_is_named(tmp_path: Path) -> None:
    rest = {item: SCORES[item] for item in ("b, 1", "c")}
    result = only(DpgOfficial(scores=True), judged(tmp_path, written(rest)))
    assert result.reason == "left out by the official program: a"
    assert result.samples["index"] == [0, 1, 2, 3, 8, 9, 10, 11]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "not the output of a finished compute_dpg_bench.py"),
        (written(SCORES, done=False), "not the output of a finished compute_dpg_bench.py"),
        (written({**SCORES, "d": [1.0] * 4}), "d is not an item of this run"),
        (written({item: each[:2] for item, each in SCORES.items()}), "2 scores of b, 1, which has 4 images"),
        (written({"c": SCORES["c"]}), "no scores of b, 1, a (2 of 3 items are missing"),
        (written(SCORES).replace("0.25, 1.0", "0.75, 1.0"), "line 2: 0.8125 is not the mean"),
        (written({**SCORES, "a": [2.0] * 4}), "line 2: 2.0 is not the mean of scores from 0 to 1"),
        (written(SCORES).split("Model")[0] + written(SCORES), "line 4: b, 1 appears twice"),
        (written(SCORES).replace("DPG-Bench score: ", "DPG-Bench score: 1"), "is not the mean of its lines"),
    ],
)
def test_other_files_are_refused(text: str, complaint: str, tmp_path: Path) -> None:
    assert complaint in reason(DpgOfficial(scores=True), "failed", judged(tmp_path, text))


def test_other_runs_are_refused(tmp_path: Path) -> None:
    assert "use prompts=dpg" in reason(DpgOfficial(), "skipped", make_noise(tmp_path / "other", [{}, {}]))
    for metas, complaint in (
        ([{"item_id": "a"}, {}], "sample 1 has no DPG item"),
        ([{"item_id": "a"}] * 5, "at most 4, not 5"),
        ([{"item_id": "a"}] * 2 + [{"item_id": "b"}], "not 1, 2 (prompts.per_prompt)"),
    ):
        assert complaint in reason(DpgOfficial(), "failed", make_noise(tmp_path / str(len(metas)), metas))
