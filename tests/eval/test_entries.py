"""Metrics as a run calls them, against sums written out over features of the images or over stored tokens."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvbench.core.files import hash_content
from kvbench.eval.distribution.fid import Fid, FidReal
from kvbench.eval.distribution.kid import Kid
from kvbench.eval.distribution.precision_recall import PrecisionRecall
from kvbench.eval.files import store
from kvbench.eval.files.kinds import READINGS
from kvbench.eval.files.readings import ReadingSet
from kvbench.eval.spaces.scenes import Scenes
from kvbench.eval.text.forced import Kl, Perplexity, SameTop1
from kvbench.models.outputs import ReadText
from tests.support.image_sets import FEATURES, make_set, only, pixels, write_lines

SPACE = Scenes(str(FEATURES), batch=5)
NAMES = [f"s64_{i:03d}" for i in range(10)]
Features = NDArray[np.float64]


def measure_frechet(a: Features, b: Features) -> float:
    """|m - n|^2 + tr(C + D) - 2 tr((C D)^1/2), the last trace by singular values of both centred sets."""
    centred = [(x - x.mean(0)) / math.sqrt(len(x) - 1) for x in (a, b)]
    shared = np.linalg.svd(centred[0] @ centred[1].T, compute_uv=False).sum()
    return float(((a.mean(0) - b.mean(0)) ** 2).sum() + sum((x**2).sum() for x in centred) - 2 * shared)


def measure_discrepancy(a: Features, b: Features) -> float:
    """1000 times the unbiased squared discrepancy, without the pairs of one sample."""
    n = len(a)
    sums = [
        sum((x[i] @ y[j] / x.shape[1] + 1) ** 3 for i in range(n) for j in range(n) if i != j)
        for x, y in ((a, a), (b, b), (a, b))
    ]
    return 1000 * float(sums[0] + sums[1] - 2 * sums[2]) / (n * (n - 1))


def cover(points: Features, centres: Features, neighbour: int) -> float:
    """Share of points within the distance of some centre to its k-th neighbour."""
    radii = [sorted(np.linalg.norm(one - other) for other in centres)[neighbour] for one in centres]
    inside = [
        any(np.linalg.norm(point - one) <= radius for one, radius in zip(centres, radii, strict=True))
        for point in points
    ]
    return sum(inside) / len(inside)


def test_distances_of_a_run_are_those_of_its_features(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVBENCH_FEATURES", str(tmp_path / "store"))
    store.clear_memory()
    few = [*NAMES[:5], *NAMES[:5]]  # so that neither side covers as much as the other
    pair = tuple(
        make_set(tmp_path / side, [pixels(name, side) for name in names])
        for side, names in (("cmp", NAMES), ("ref", few))
    )
    ours, theirs = (SPACE.features(side, "cpu").arrays["features"].astype(float) for side in pair)
    assert np.abs(ours - theirs).max() > 0.01
    found = {
        name: score.value
        for metric in (Fid(SPACE), Kid(SPACE), PrecisionRecall(SPACE, neighbour=1))
        for name, score in only(metric, *pair).scores.items()
    }
    assert found == {
        "fid_scenes": pytest.approx(measure_frechet(ours, theirs), rel=1e-3),
        "kid_scenes": pytest.approx(measure_discrepancy(ours, theirs), rel=1e-3),
        "precision_scenes": cover(ours, theirs, 1),
        "recall_scenes": cover(theirs, ours, 1),
    }
    assert found["precision_scenes"] != found["recall_scenes"]
    [real] = only(FidReal(SPACE, str(pair[1].folder / "images")), pair[0]).scores.values()
    assert real.value == pytest.approx(measure_frechet(ours, theirs), rel=1e-3)
    store.clear_memory()


LENGTHS = (2, 5, 3)


def test_texts_of_unequal_length_count_alike(tmp_path: Path) -> None:
    (tmp_path / "readings").mkdir()
    rng, lines, texts = np.random.default_rng(0), [], []
    for index, length in enumerate(LENGTHS):
        kl, nll, full = rng.gamma(1, 0.3, (3, length)).astype(np.float32)
        top, top_full = rng.integers(0, 2, (2, length)).astype(np.int32)
        tensors = (torch.from_numpy(x) for x in (top, top_full, kl, nll, full))
        content = READINGS.encode(ReadText(torch.arange(length, dtype=torch.int32), *tensors))
        READINGS.find(tmp_path, index).write_bytes(content)
        lines.append({"index": index, "seed": 0, "prompt": f"text {index}", "sha256": hash_content(content)})
        texts.append([x.tolist() for x in (kl, top == top_full, nll, full)])
    write_lines(tmp_path, lines)
    readings = ReadingSet(tmp_path)
    means = [[sum(column) / len(column) for column in text] for text in texts]
    kl, same, nll, full = (sum(column) / len(LENGTHS) for column in zip(*means, strict=True))
    found = {
        name: score.value
        for metric in (Kl(), SameTop1(), Perplexity())
        for name, score in only(metric, readings).scores.items()
        if "_p9" not in name
    }
    expected = {
        "kl": kl,
        "same_top1": same,
        "perplexity": math.exp(nll),
        "nll_change": nll - full,
        "perplexity_full": math.exp(full),
    }
    assert found == pytest.approx(expected, rel=1e-6)
