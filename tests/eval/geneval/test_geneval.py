"""GenEval's rules against verdicts of the official functions, and its neural detector on a tiny random network."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy import stats
from torch import Tensor, nn

from kvbench.eval.files.weights import Weight, file_sha256
from kvbench.eval.geneval.colors import COLORS, ClipColors
from kvbench.eval.geneval.mask2former import CLASSES, Mask2Former, find_instances
from kvbench.eval.geneval.rules import TASKS, Line, Thresholds, judge_image, keep_detections, relations
from kvbench.eval.geneval.score import GenEval, summarise_verdicts
from kvbench.scenes.exact import Exact
from kvbench.scenes.grammar import sample
from kvbench.scenes.world import Scene, render
from tests.support.image_sets import GOLDEN, make_noise, make_set, only, reason
from tests.support.marks import needs
from tests.support.tiny import MODEL, tiny_clip

pytestmark = pytest.mark.usefixtures("offline")
STORED = json.loads((GOLDEN / "geneval_cases.json").read_text())
CASES = {case["name"]: case for case in STORED["cases"]}


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
    summary = STORED["summary"]
    assert scores["geneval[x]"].value == pytest.approx(summary["overall"])
    assert {task: scores[f"geneval[x]/{task}"].value for task in TASKS} == pytest.approx(summary["per_task"])
    assert scores["geneval[x]/correct_prompts"].value == pytest.approx(summary["image_mean"])
    assert scores["geneval[x]/position"].n == tags.count("position")


def test_a_perfect_geneval_is_not_certain() -> None:
    tags, prompts = ["colors"] * 40 + ["counting"] * 40, [f"prompt {i // 4}" for i in range(80)]
    scores = summarise_verdicts("g", tags, [True] * 80, prompts)
    ends = {name: score.ci95 or (0, 0) for name, score in scores.items()}
    for name, count, quantile in (("colors", 10, stats.t.ppf(0.975, 9)), ("correct_prompts", 20, 1.959964)):
        assert ends[f"g/{name}"] == pytest.approx((count / (count + quantile**2), 1))  # of prompts
    assert ends["g"] == pytest.approx((1 - (1 - ends["g/colors"][0]) / 2**0.5, 1))  # of two such tasks


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


@pytest.fixture(scope="module")
def clip_weight(tmp_path_factory: pytest.TempPathFactory) -> Weight:
    return tiny_clip(tmp_path_factory.mktemp("clip"))


def logits_of(classes: Tensor, masks: Tensor) -> SimpleNamespace:
    return SimpleNamespace(class_queries_logits=classes, masks_queries_logits=masks)


def test_instances_equal_a_slow_reference() -> None:
    torch.manual_seed(3)
    output = logits_of(3 * torch.randn(1, 6, 81), torch.randn(1, 6, 8, 12) + 0.3)
    padded, valid, size = (32, 48), (30, 41), (60, 82)
    found = find_instances(output, padded, valid, size, min_score=0.0)
    up = nn.functional.interpolate(output.masks_queries_logits, padded, mode="bilinear")
    up = nn.functional.interpolate(up[:, :, :30, :41], size, mode="bilinear")[0].double().numpy()
    logits = output.class_queries_logits[0].double().numpy()
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    pairs = [(shares[q, c], q, c) for q in range(6) for c in range(80)]
    expected = []
    for share, query, label in sorted(pairs, reverse=True)[:100]:
        inside = up[query] > 0
        ys, xs = np.nonzero(inside)
        box = (xs.min(), ys.min(), xs.max() + 1, ys.max() + 1)
        certain = (1 / (1 + np.exp(-up[query])))[inside].mean()
        expected.append((share * certain, CLASSES[label], box))
    expected.sort(key=lambda e: -e[0])
    assert len(found) == 100
    assert [segment.score for segment in found] == pytest.approx([e[0] for e in expected], rel=1e-4)
    assert [(s.label, s.box) for s in found[:20]] == [(label, box) for _, label, box in expected[:20]]
    strong = find_instances(output, padded, valid, size, min_score=0.1)
    assert [s.score for s in strong] == [s.score for s in found if s.score >= 0.1]
    empty = logits_of(9 * torch.eye(81)[None, 5:6], torch.full((1, 1, 4, 4), -1.0))
    assert find_instances(empty, (16, 16), (16, 16), (20, 20)) == []


def test_class_names_are_geneval_s(tmp_path: Path) -> None:
    listed = "".join(f"{name}\n" for name in CLASSES)  # as in its object_names.txt
    sha256 = "608f6a0e5c8ca1c7a92b818430141fe268c85b7930b50f4160f1d65893b5bacd"
    assert hashlib.sha256(listed.encode()).hexdigest() == sha256


COCO = [
    {"computer mouse": "mouse", "tv remote": "remote", "computer keyboard": "keyboard"}.get(c, c)
    for c in CLASSES
]


def tiny_mask2former(folder: Path, clip: Weight, classes: Sequence[str] = COCO) -> Mask2Former:
    import transformers

    stages = {
        "depths": [1, 1, 1, 1],
        "num_heads": [1, 1, 2, 2],
        "out_features": [f"stage{n}" for n in range(1, 5)],
    }
    backbone = transformers.SwinConfig(image_size=32, embed_dim=8, window_size=2, **stages)
    wide = dict.fromkeys(("feature_size", "mask_feature_size", "hidden_dim"), 32)
    narrow = dict.fromkeys(("encoder_feedforward_dim", "dim_feedforward"), 16)
    counts = {"encoder_layers": 1, "decoder_layers": 2, "num_attention_heads": 2, "num_queries": 5}
    config = transformers.Mask2FormerConfig(
        backbone_config=backbone, id2label=dict(enumerate(classes)), **wide, **narrow, **counts
    )
    torch.manual_seed(4)
    model = transformers.Mask2FormerForUniversalSegmentation(config)
    with torch.no_grad():
        model.class_predictor.bias[16] += 9  # every query sees a dog
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text("{}")
    colors = ClipColors(clip.path, MODEL, clip)
    return Mask2Former(str(folder), shortest=48, longest=80, colors=colors)


@needs("open_clip", "transformers")
def test_geneval_runs_on_mask2former_and_clip(clip_weight: Weight, tmp_path: Path) -> None:
    detector = tiny_mask2former(tmp_path / "model", clip_weight)
    line = {"tag": "colors", "include": [{"class": "dog", "count": 1, "color": "red"}], "prompt": "a red dog"}
    images = make_noise(tmp_path / "run", [line] * 3)
    result = only(GenEval(detector, "mask2former-hf"), images)
    assert "geneval[mask2former-hf]/colors" in result.scores
    for seen, correct, why in zip(
        *(result.samples[c] for c in ("found", "geneval[mask2former-hf]", "reason")), strict=True
    ):
        assert {one["label"] for one in seen} == {"dog"}
        if not correct:
            assert why.startswith("expected red dog>=1, found 0 (colours: ")
            assert why[:-1].split(": ")[1] in COLORS
    used = result.provenance["weights"]
    assert used["tiny.safetensors"] == clip_weight.sha256
    file = "facebook/mask2former-swin-small-coco-instance/model.safetensors"
    assert used[file] == file_sha256(tmp_path / "model" / "model.safetensors")


@needs("open_clip", "transformers")
def test_other_detectors_and_prompts_are_refused(clip_weight: Weight, tmp_path: Path) -> None:
    detector = tiny_mask2former(tmp_path / "model", clip_weight)
    line = {"tag": "counting", "include": [{"class": "ring", "count": 2}], "prompt": "two rings"}
    images = make_noise(tmp_path / "run", [line] * 2)
    assert "lacks class ring" in reason(GenEval(detector, "mask2former-hf"), "skipped", images)
    path = tmp_path / "model" / "model.safetensors"
    state = load_file(path)
    state.pop("class_predictor.weight")
    save_file(state, path, {"format": "pt"})
    with pytest.raises(ValueError, match=r"not a whole Mask2Former\w+: class_predictor\.weight is missing"):
        detector.load("cpu")
    other = tiny_mask2former(tmp_path / "other", clip_weight, ["person", *COCO[1:79]])
    with pytest.raises(ValueError, match="has 79 classes, from person to hair drier"):
        other.load("cpu")
