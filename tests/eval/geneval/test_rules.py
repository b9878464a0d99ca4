"""GenEval's rules against verdicts of the official functions, and the evaluator around them."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from kvbench.eval.geneval.rules import TASKS, Line, Thresholds, judge_image, keep_detections, relations
from kvbench.eval.geneval.score import GenEval, summarise_verdicts
from kvbench.scenes.exact import Exact
from kvbench.scenes.grammar import sample
from kvbench.scenes.world import Scene, render
from tests.support.image_sets import make_noise, make_set, only, reason
from tests.support.places import GOLDENS

GOLDEN = json.loads((GOLDENS / "eval" / "geneval_cases.json").read_text())
CASES = {case["name"]: case for case in GOLDEN["cases"]}


@dataclass(frozen=True)
class Found:
    label: str
    score: float = 1.0
    box: tuple[float, ...] = (0, 0, 10, 10)
    color: str | None = None


def instances(case: dict[str, list[dict[str, object]]]) -> list[Found]:
    return [Found(d["label"], d["score"], tuple(d["box"]), d["color"]) for d in case["detections"]]


def rules(options: dict[str, float]) -> Thresholds:
    names = ("THRESHOLD", "COUNTING_THRESHOLD", "MAX_OBJECTS", "NMS_THRESHOLD", "POSITION_THRESHOLD")
    return Thresholds(*(options[name] for name in names))


@pytest.mark.parametrize("name", CASES)
def test_verdict_equals_the_official_one(name: str) -> None:
    case = CASES[name]
    chosen = rules(case["options"])
    correct, reasons = judge_image(instances(case), case["metadata"], rules=chosen)
    assert correct == case["correct"]
    assert len(reasons) == len(case["reason"].split("\n")) - (case["reason"] == "")
    kept = keep_detections(instances(case), case["metadata"]["tag"], chosen)
    assert {label: len(boxes) for label, boxes in kept.items()} == case["kept"]


def test_summary_equals_the_official_one() -> None:
    tags = [case["metadata"]["tag"] for case in CASES.values()]
    scores = summarise_verdicts("geneval[x]", tags, [case["correct"] for case in CASES.values()], list(CASES))
    summary = GOLDEN["summary"]
    assert scores["geneval[x]"].value == pytest.approx(summary["overall"])
    assert {task: scores[f"geneval[x]/{task}"].value for task in TASKS} == pytest.approx(summary["per_task"])
    assert scores["geneval[x]/correct_prompts"].value == pytest.approx(summary["image_mean"])
    assert scores["geneval[x]/position"].n == tags.count("position")


def test_equal_boxes_side_by_side_need_four_tenths_of_their_size() -> None:
    found = [relations((distance, 0, distance + 100, 100), (0, 0, 100, 100)) for distance in (39, 41)]
    assert found == [set(), {"right of"}]


def test_a_box_of_exactly_the_maximum_overlap_is_dropped() -> None:
    """Boxes of 10 x 10 and 10 x 5 pixels, ends included: the shared half is 0.5 of the union."""
    whole, half = Found("cup", 0.9, (0, 0, 9, 9)), Found("cup", 0.8, (0, 0, 9, 4))
    for overlap, kept in ((0.5, [whole]), (0.501, [whole, half])):
        found = keep_detections(
            [half, whole], "counting", Thresholds(counting_threshold=0.3, max_overlap=overlap)
        )
        assert found == {"cup": kept}


@pytest.mark.parametrize(
    "meta",
    [
        {"include": [{"class": "dog", "count": 1}]},
        {"tag": "colours", "include": [{"class": "dog", "count": 1}]},
        {"tag": "colors", "include": []},
        {"tag": "colors", "include": [{"class": "dog"}]},
        {"tag": "position", "include": [{"class": "dog", "count": 1, "position": ["left of"]}]},
        {"tag": "colors", "include": "dog"},
    ],
)
def test_malformed_lines_are_refused(meta: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="not a GenEval line"):
        Line.parse(meta)


def two_dogs(image: np.ndarray) -> list[Found]:
    """Sees two dogs in every image whose red value is even, else one."""
    return [Found("dog")] * (2 - int(image[0, 0, 0]) % 2)


def test_evaluator_judges_every_image(tmp_path: Path) -> None:
    line = {
        "tag": "counting",
        "include": [{"class": "dog", "count": 2}],
        "exclude": [{"class": "dog", "count": 3}],
        "prompt": "two dogs",
    }
    result = only(GenEval(two_dogs, "toy"), make_noise(tmp_path / "run", [line] * 5))
    assert result.scores["geneval[toy]"].value == pytest.approx(0.6)
    assert set(result.scores) == {"geneval[toy]", "geneval[toy]/counting", "geneval[toy]/correct_prompts"}
    assert "no prompts of single_object" in str(result.reason)
    assert result.samples["geneval[toy]"] == [True, False, True, False, True]
    assert result.samples["reason"][1] == "expected dog>=2, found 1"
    assert str(result.provenance["settings"]["detector"]).endswith("two_dogs")
    assert result.save(tmp_path / "metrics").name == "geneval-toy.json"
    other = make_noise(tmp_path / "other", [{}, {}])
    assert "no GenEval lines" in reason(GenEval(two_dogs, "toy"), "skipped", other)


def test_rewritten_prompts_have_a_metric_of_their_own(tmp_path: Path) -> None:
    line = {"tag": "counting", "include": [{"class": "dog", "count": 2}], "prompt": "two dogs"}
    metas = [{**line, "rewritten_from": f"two dogs {n // 2}"} for n in range(4)]
    images = make_noise(tmp_path / "own", metas)
    assert images.clusters == ["two dogs 0", "two dogs 0", "two dogs 1", "two dogs 1"]
    result = only(GenEval(two_dogs, "toy"), images)
    assert set(result.scores) == {
        f"geneval[toy-rewritten]{part}" for part in ("", "/counting", "/correct_prompts")
    }
    assert result.scores["geneval[toy-rewritten]/correct_prompts"].n == 2


def test_exact_counts_images_without_missing_or_extra_objects(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    scenes = [sample(rng, TASKS[i % len(TASKS)]) for i in range(8)]
    bare = [render(Scene(scene.objects[1:], scene.background)) for scene, _, _ in scenes[:2]]
    pictures = bare + [render(scene) for scene, _, _ in scenes[2:]]
    result = only(Exact(), make_set(tmp_path / "own", pictures, metas=[meta for _, _, meta in scenes]))
    assert result.scores["exact[scenes]"].value == pytest.approx(6 / 8)
    assert result.samples["exact[scenes]"] == [False] * 2 + [True] * 6
    reason(Exact(), "skipped", make_noise(tmp_path / "other", [{}, {}]))
