"""Run folders out of arrays and readings, stored references, and stand-ins for networks with weights of their own."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.numpy import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from kvbench.core.files import hash_content
from kvbench.eval.files.images import ImageSet
from kvbench.eval.files.kinds import IMAGES, READINGS, SampleKind
from kvbench.eval.files.readings import ReadingSet
from kvbench.eval.files.samples import SampleSet
from kvbench.eval.files.store import Arrays
from kvbench.eval.files.weights import file_sha256
from kvbench.eval.protocol.base import Evaluator, Result, evaluate
from kvbench.eval.protocol.scores import MetricSpec, Score, Status
from kvbench.eval.spaces.base import Space
from kvbench.eval.spaces.inception import ADM, CLEAN, Adm, Clean
from tests.support.places import ASSETS, GOLDENS

GOLDEN = GOLDENS / "eval"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())
ARRAYS = load_file(GOLDEN / "arrays.safetensors")
PAIRS = {pair["name"]: pair for pair in EXPECTED["pairs"]}
SCORED = 60
"""Samples of `run_folder`."""
FEATURES = ASSETS / "infinity_tiny" / "features.safetensors"


def pixels(name: str, side: str) -> np.ndarray:
    return np.array(Image.open(GOLDEN / side / f"{name}.png"))


def make_set(
    folder: Path,
    images: Sequence[np.ndarray],
    prompts: Sequence[str] | None = None,
    metas: Sequence[Mapping[str, object]] | None = None,
) -> ImageSet:
    """A run folder of images, by default with prompts "prompt 0", "prompt 1" and so on."""
    made = prompts or [f"prompt {index}" for index in range(len(images))]
    write_samples(folder, IMAGES, images, made, [{"meta": meta} for meta in metas or [{}] * len(images)])
    return ImageSet(folder)


def write_samples(
    folder: Path,
    kind: SampleKind,
    samples: Sequence[object],
    prompts: Sequence[str],
    records: Sequence[Mapping[str, object]],
) -> None:
    """The files of samples, and a record of each with further fields."""
    (folder / kind.kind).mkdir(parents=True)
    lines = []
    for index, (sample, prompt, more) in enumerate(zip(samples, prompts, records, strict=True)):
        content = kind.encode(sample)
        kind.find(folder, index).write_bytes(content)
        line = {"index": index, "seed": 0, "prompt": prompt, "sha256": hash_content(content)}
        lines.append({**line, **more})
    write_lines(folder, lines)


def make_noise(
    folder: Path, metas: Sequence[Mapping[str, object]], prompts: Sequence[str] | None = None, size: int = 40
) -> ImageSet:
    """A run folder of noise; the first pixel of an image is its number."""
    images = np.random.default_rng(0).integers(0, 256, (len(metas), size, size, 3), np.uint8)
    images[:, 0, 0] = np.arange(len(metas))[:, None]
    return make_set(folder, list(images), prompts, metas)


def make_readings(
    folder: Path, texts: Sequence[object], metas: Sequence[Mapping[str, object]] | None = None
) -> ReadingSet:
    """A run folder of texts that were read, with prompts "text 0", "text 1" and so on."""
    prompts = [f"text {index}" for index in range(len(texts))]
    write_samples(folder, READINGS, texts, prompts, [{"meta": meta} for meta in metas or [{}] * len(texts)])
    return ReadingSet(folder)


def run_folder(
    path: Path,
    columns: Mapping[str, Sequence[object]],
    metrics: Mapping[str, MetricSpec],
    scores: Mapping[str, Score] | None = None,
) -> Path:
    """A run folder without images: the files of one evaluator, with two samples of every prompt."""
    lines = [{"index": i, "seed": 0, "prompt": f"prompt {i // 2}", "sha256": "0"} for i in range(SCORED)]
    samples = {"index": list(range(SCORED)), **columns} if columns else None
    scores = dict(scores or {name: Score(None) for name in metrics})
    Result("made-up", "of numbers", "ok", None, metrics, scores, samples).save(path / "metrics")
    write_lines(path, lines)
    return path


def write_lines(folder: Path, lines: Sequence[Mapping[str, object]], name: str = "samples.jsonl") -> None:
    (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


def golden_pair(folder: Path, names: Sequence[str] = tuple(PAIRS)) -> tuple[ImageSet, ImageSet]:
    """The stored comparisons and their references."""
    cmp, ref = (make_set(folder / side, [pixels(name, side) for name in names]) for side in ("cmp", "ref"))
    return cmp, ref


def average_column(result: Result, name: str) -> float:
    """The mean of a metric's values of samples, or of the means of groups of samples."""
    samples = result.samples or {}
    found: dict[object, list[float]] = {}
    for number, value in enumerate(samples[name]):
        if value is not None and np.isfinite(value):
            group = samples[result.metrics[name].strata][number] if result.metrics[name].strata else None
            found.setdefault(group, []).append(float(value))
    return float(np.mean([np.mean(values) for values in found.values()]))


def only(evaluator: Evaluator, samples: SampleSet, reference: SampleSet | None = None) -> Result:
    """The result of an evaluator, whose metrics of several samples are compared by samples or by replicates."""
    [result] = evaluate([evaluator], samples, reference)
    assert result.status == "ok", result.provenance.get("traceback", result.reason)
    for name, score in result.scores.items():
        by_samples = score.ci95 is not None and score.n > 2 and score.replicates is None
        if by_samples and not result.metrics[name].detail:
            assert abs(average_column(result, name) - score.value) <= 1e-6 * max(1, abs(score.value)), name
    return result


def reason(
    evaluator: Evaluator, status: Status, samples: SampleSet, reference: SampleSet | None = None
) -> str:
    """Why an evaluator was skipped or failed."""
    [result] = evaluate([evaluator], samples, reference)
    assert result.status == status, result.provenance.get("traceback", result.reason)
    return str(result.reason)


class Pooled(nn.Module):
    """Stands in for Inception's layers: 2048 fixed linear features of an 8 x 8 thumbnail."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(192, 2048)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(F.adaptive_avg_pool2d(x, 8).flatten(1))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = Pooled()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class FewFeatures(Space):
    """The first 64 of 2048 features and logits: a distance over all of them takes seconds."""

    def compute(self, source: ImageSet, file: Path, device: str) -> Arrays:
        return {name: found[:, :64] for name, found in super().compute(source, file, device).items()}


class FewClean(FewFeatures, Clean): ...


class FewAdm(FewFeatures, Adm): ...


def clean_stand_in(folder: Path, **settings: int) -> Clean:
    """The space `clean` on a TorchScript network of fixed random weights, under its own hash."""
    torch.manual_seed(0)
    path = folder / CLEAN.file
    torch.jit.script(Network()).save(str(path))
    return FewClean(path=str(path), network=replace(CLEAN, sha256=file_sha256(path)), **settings)


def adm_stand_in(folder: Path) -> Adm:
    """The space `adm` on torch-fidelity's own network with random weights, under their own hash."""
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

    class Blank(FeatureExtractorInceptionV3):
        def load_state_dict(self, state_dict: object, *_: object, **__: object) -> None:
            """Keeps the initial weights."""

    torch.manual_seed(0)
    empty = folder / "empty.pth"
    torch.save({}, empty)
    network = Blank("blank", ["2048"], feature_extractor_weights_path=str(empty))
    # Batch norm with its initial statistics lets signals die out over 90 layers: keep their variance by hand.
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight)
    path = folder / ADM.file
    torch.save(network.state_dict(), path)
    return FewAdm(path=str(path), batch=2, network=replace(ADM, sha256=file_sha256(path), size=None))
