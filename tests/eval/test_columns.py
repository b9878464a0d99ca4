"""Every metric of conf/eval can be compared between runs: by a column of its own name, or by replicates."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from kvbench.eval.alignment import aesthetic, clip, hps, imagereward, pickscore
from kvbench.eval.alignment.judge import JudgeModel, VlmJudge
from kvbench.eval.alignment.vqa import BlipVqa
from kvbench.eval.distribution import base, fid, mjhq
from kvbench.eval.distribution.dataset import Pictures
from kvbench.eval.files.images import ImageSet
from kvbench.eval.files.store import StoredFeatures
from kvbench.eval.files.weights import Snapshot, Weight
from kvbench.eval.geneval.mask2former import Mask2Former
from kvbench.eval.geneval.score import LoadedDetector
from kvbench.eval.paired import dists, lpips
from kvbench.eval.protocol.base import Result
from kvbench.eval.protocol.compare import compare_runs
from kvbench.eval.protocol.official import OfficialProgram
from kvbench.eval.registry import build_metrics, describe_metrics, read_metrics
from kvbench.eval.spaces.clip import ClipImages
from kvbench.eval.spaces.dinov2 import Dinov2
from kvbench.eval.spaces.dreamsim import DreamSimEmbeddings
from kvbench.eval.spaces.efficientnet import EfficientNetLite0
from kvbench.eval.spaces.inception import Adm, Clean
from kvbench.scenes import grammar
from kvbench.scenes.detector import detect
from kvbench.scenes.world import SHAPES, render
from tests.support.image_sets import make_set, only
from tests.support.marks import slow_except

METRICS = {name: build_metrics(read_metrics(name)) for name in describe_metrics()}
SINGLE = [
    name
    for name, [evaluator, *more] in METRICS.items()
    if not more and evaluator.reads == ImageSet.kind and not isinstance(evaluator, OfficialProgram)
]
"""Metrics of images; tests/eval/test_official.py has those that other programs compute."""
COUNT = 24
FOUND = Weight.find


class Difference(nn.Module):
    def forward(self, first: Tensor, second: Tensor, **_: object) -> Tensor:
        return (first - second).abs().mean((1, 2, 3))


class Thumbnails:
    """Stands in for CLIP: an image is its thumbnail, a text its hash."""

    side = 8

    def __init__(self, *_: object, **__: object) -> None:
        self.transform = lambda image: torch.from_numpy(np.array(image.resize((8, 8)), np.float32) / 255)

    def images(self, pixels: Tensor) -> Tensor:
        return nn.functional.normalize(pixels.flatten(1), dim=1)

    def texts(self, texts: Sequence[str]) -> Tensor:
        rngs = [np.random.default_rng(list(text.encode())) for text in texts]
        return nn.functional.normalize(
            torch.tensor(np.array([rng.random(192) for rng in rngs])).float(), dim=1
        )


def thumbnails(self: object, source: ImageSet | Pictures, *_: object) -> dict[str, np.ndarray]:
    images = [Image.fromarray(image) for stack in source.stacks(8, "thumbnails") for image in stack]
    stack = np.stack([np.array(image.resize((4, 4))) for image in images])
    features = stack.reshape(len(stack), -1).astype(np.float32)
    return {"features": features, "logits": features[:, :10]}


def answer(pixels: np.ndarray, questions: Sequence[str]) -> list[str]:
    return ["yes" if (int(pixels.sum()) + len(question)) % 3 else "no" for question in questions]


def judge(*_: object) -> JudgeModel:
    """A judge of two tokens, whose answers depend on image and text."""

    def predict(pixels: np.ndarray, texts: Sequence[str]) -> Tensor:
        yes = torch.tensor([(int(pixels.sum()) + len(text)) % 97 / 97 for text in texts])
        return torch.stack((1 - yes, yes), 1)

    return JudgeModel(predict, lambda text: int(text in ("Yes", "two")), ("no", "yes").__getitem__, {})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[ImageSet]:
    """Two runs and their reference: enlarged scenes with noise, two images a prompt, each prompt of every benchmark."""
    root, rng = tmp_path_factory.mktemp("runs"), np.random.default_rng(0)
    drawn = [grammar.sample(rng, grammar.TASKS[i // 2 % 6]) for i in range(COUNT)]
    metas = [
        {
            **drawn[index - index % 2][2],
            "item_id": f"item {index // 2}",
            "style": hps.STYLES[index // 2 % 4],
            "category": mjhq.CATEGORIES[index // 2 % 3],
            "vqa_list": [["How many dogs are there?", "two"], ["Is there a cat?", "Yes"]],
            "skills": ["count", "object"],
            "atom_count": 3 + index // 2 % 8,
        }
        for index in range(COUNT)
    ]
    prompts = [drawn[index - index % 2][1] for index in range(COUNT)]
    clean = np.stack([render(scene).repeat(2, 0).repeat(2, 1) for scene, _, _ in drawn])
    sides = []
    for name, noise in (("ours", 12), ("theirs", 6), ("reference", 0)):
        pixels = np.clip(clean + rng.normal(0, noise, clean.shape), 0, 255).astype(np.uint8)
        sides.append(make_set(root / name, list(pixels), prompts, metas))
    return sides


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are all there, and in the networks' place something that depends on the pixels."""
    rows = [
        f'item {i},1,0,"entity - whole (x)",one?\nitem {i},2,1,"other (x)",two of them?\n'
        for i in range(COUNT)
    ]
    heading = "item_id,proposition_id,dependency,tuple,question_natural_language\n"
    (tmp_path / "dpg_bench.csv").write_text(heading + "".join(rows))

    def find(self: Weight) -> Path:
        return FOUND(self) or tmp_path / self.file

    def moments(*_: object) -> tuple[Tensor, Tensor, dict[str, object]]:
        return torch.full((48,), 128.0).double(), 900 * torch.eye(48).double(), {}

    def features(*_: object) -> tuple[StoredFeatures, dict[str, object]]:
        return StoredFeatures(
            {"features": np.random.default_rng(1).uniform(90, 200, (30, 48)).astype(np.float32)}, False
        ), {}

    rng = np.random.default_rng(2)
    for category in mjhq.CATEGORIES[:3]:
        (tmp_path / mjhq.FOLDER / category).mkdir(parents=True)
        for number in range(12):
            pixels = rng.integers(90, 200, (8, 8, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / mjhq.FOLDER / category / f"{number}.jpg")
    monkeypatch.setattr(mjhq.FidMjhq, "_find", lambda _: tmp_path / mjhq.FOLDER)
    monkeypatch.setattr(Weight, "find", find)
    monkeypatch.setattr(Weight, "require", lambda self: (find(self), "0" * 64))
    monkeypatch.setattr(Snapshot, "find", lambda self: tmp_path)
    monkeypatch.setattr(Snapshot, "require", lambda self: (tmp_path, {}))
    for module in (aesthetic, clip, hps):
        monkeypatch.setattr(module, "Clip", Thumbnails)
    for module in (pickscore, imagereward):
        monkeypatch.setattr(module, "load_scorer", lambda *_: lambda images, _: images.mean((1, 2, 3)))
    monkeypatch.setattr(aesthetic, "read_state", lambda _: {})
    monkeypatch.setattr(aesthetic, "read_head", lambda *_: lambda rows: rows @ torch.linspace(-1, 1, 192))
    monkeypatch.setattr(VlmJudge, "load", judge)
    monkeypatch.setattr(BlipVqa, "load", lambda *_: (answer, {}))
    monkeypatch.setattr(Mask2Former, "load", lambda *_: LoadedDetector(detect))
    monkeypatch.setattr(Mask2Former, "classes", tuple(SHAPES))
    monkeypatch.setattr(lpips, "alex", lambda *_: Difference())
    monkeypatch.setattr(dists.DistsNetwork, "load", lambda *_: Difference())
    for space in (Clean, Adm, ClipImages, Dinov2, DreamSimEmbeddings, EfficientNetLite0):
        monkeypatch.setattr(space, "compute", thumbnails)
    monkeypatch.setattr(fid, "read_moments", moments)
    monkeypatch.setattr(base, "read_features", features)


def column_mean(result: Result, name: str) -> float:
    """The mean over samples, or over groups of them, one addition at a time."""
    groups = result.samples.get(result.metrics[name].strata or "", [None] * len(result.samples["index"]))
    found: dict[object, list[float]] = {}
    for group, value in zip(groups, result.samples[name], strict=True):
        if math.isfinite(value):
            found.setdefault(group, []).append(float(value))
    return sum(sum(values) / len(values) for values in found.values()) / len(found)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("name", slow_except(("clip_score", "fid_mjhq", "lpips_scenes").__contains__, SINGLE))
def test_a_metric_has_a_column_of_its_name_or_replicates(name: str, runs: list[ImageSet]) -> None:
    [evaluator] = METRICS[name]
    *sides, reference = runs
    results = []
    for side in sides:
        result = only(evaluator, side, reference)
        result.save(side.folder / "metrics")
        results.append(result)
    found = compare_runs(*(side.folder for side in sides))
    for metric, spec in results[0].metrics.items():
        if spec.detail:
            continue
        ours, theirs = (result.scores[metric] for result in results)
        if ours.replicates is None:
            for result in results:
                assert column_mean(result, metric) == pytest.approx(result.scores[metric].value)
        assert found[metric].value == pytest.approx(ours.value - theirs.value)
        assert found[metric].interval is not None
