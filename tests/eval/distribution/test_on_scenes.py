"""MIND, FID on MJHQ-30K and diversity on the scenes network: slow loops, known distances, stored values."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import Generator

from kvbench.eval.distribution.diversity import Diversity, mean_distance, vendi_score
from kvbench.eval.distribution.fid import FidReal
from kvbench.eval.distribution.mind import Mind, MindReal, draw_directions, make_sliced_distance
from kvbench.eval.distribution.mjhq import CATEGORIES, FidMjhq
from kvbench.eval.files.images import ImageSet
from kvbench.eval.networks import to_unit
from kvbench.eval.protocol.base import evaluate
from kvbench.eval.protocol.intervals import assign_groups, bootstrap
from kvbench.eval.spaces.scenes import SceneFeatures, Scenes
from kvbench.prompts import preferences
from tests.support.image_sets import FEATURES, GOLDEN, make_noise, make_set, only, pixels, reason

FEW = 7
"""Number of directions."""
NAMES = [f"s64_{i:03d}" for i in range(8)]
SPACE = Scenes(path=str(FEATURES))
STORED = json.loads((GOLDEN / "newer_metrics.json").read_text())["vendi"]


def sliced_distance(a: np.ndarray, b: np.ndarray) -> float:
    return make_sliced_distance(a, b, FEW, paired=False)(np.arange(len(a)))


def slow_mind(a: np.ndarray, b: np.ndarray) -> float:
    """3 D x the mean of squared gaps between sorted projections, one direction at a time.

    Each value is repeated as often as the other side has values, so that both sides are equally long.
    """
    found = []
    for direction in draw_directions(FEW, a.shape[1]).numpy():
        ours = sorted(float(row @ direction) for row in a for _ in range(len(b)))
        theirs = sorted(float(row @ direction) for row in b for _ in range(len(a)))
        found.append(math.fsum((x - y) ** 2 for x, y in zip(ours, theirs, strict=True)) / len(ours))
    return 3 * a.shape[1] * math.fsum(found) / FEW


@given(n=st.integers(2, 9), m=st.integers(2, 9), dim=st.integers(1, 6), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_it_follows_its_definition(n: int, m: int, dim: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(n, dim)), rng.normal(0.5, 2, size=(m, dim))
    assert sliced_distance(a, b) == pytest.approx(slow_mind(a, b), abs=1e-9)
    assert sliced_distance(a, b) == pytest.approx(sliced_distance(b, a), abs=1e-9)
    assert sliced_distance(a, a[::-1].copy()) == pytest.approx(0, abs=1e-12)


def test_directions_are_uniform_on_the_sphere() -> None:
    drawn = draw_directions(20_000, 4).numpy()
    assert np.linalg.norm(drawn, axis=1) == pytest.approx(np.ones(20_000))
    assert np.abs(drawn.mean(0)).max() < 0.02
    assert np.abs(drawn.T @ drawn / len(drawn) - np.eye(4) / 4).max() < 0.01
    assert (drawn**4).mean() == pytest.approx(3 / (4 * 6), rel=0.02)  # corners of a cube have 1/16


@pytest.mark.parametrize("paired", [True, False])
def test_leaving_samples_out_equals_computing_again(rng: Generator, paired: bool) -> None:
    a, b = rng.normal(size=(2, 30, 4))
    distance = make_sliced_distance(a, b, FEW, paired=paired)
    dealt = assign_groups([str(row // 2) for row in range(30)])
    for group in range(int(dealt.max()) + 1):
        kept = np.flatnonzero(dealt != group)
        other = b[kept] if paired else b
        assert distance(kept) == pytest.approx(sliced_distance(a[kept], other), abs=1e-12)


def test_a_run_is_compared_with_its_reference_and_with_as_many_real_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVBENCH_FEATURES", str(tmp_path / "store"))
    ours, theirs = (make_set(tmp_path / side, [pixels(n, side) for n in NAMES]) for side in ("cmp", "ref"))
    a, b = (SPACE.features(side, "cpu").arrays["features"].astype(float) for side in (ours, theirs))
    paired = only(Mind(SPACE, FEW), ours, theirs).scores["mind_scenes"]
    assert paired.value == pytest.approx(slow_mind(a, b), rel=1e-6)
    assert paired.ci.startswith("jackknife")
    assert MindReal(SPACE, None, FEW).weights[1].find() is None  # moments do not suffice
    few = make_set(tmp_path / "few", [pixels(n, "cmp") for n in NAMES[:5]])
    for images, features in ((ours, a), (few, a[:5])):
        real = MindReal(SPACE, str(theirs.folder / "images"), FEW)
        drawn = np.random.default_rng(0).permutation(8)[: len(features)]
        [score] = only(real, images).scores.values()
        assert score.value == pytest.approx(slow_mind(features, b[drawn]), rel=1e-6)


KINDS = ("people", "art")


@pytest.fixture
def real(tmp_path: Path) -> Path:
    """Ten images of two categories, and of one that the run does not have."""
    rng = np.random.default_rng(4)
    for number, kind in enumerate((*KINDS, "food")):
        pixels = rng.integers(0, 200 + 20 * number, (10, 32, 32, 3), np.uint8)
        made = make_set(tmp_path / f"made {kind}", list(pixels)).folder / "images"
        shutil.copytree(made, tmp_path / "real" / kind)
    return tmp_path / "real"


def made(folder: Path, kinds: list[str]) -> ImageSet:
    return make_noise(folder, [{"category": kind} for kind in kinds], size=32)


def test_distances_are_those_to_folders_of_the_same_images(real: Path, tmp_path: Path) -> None:
    (tmp_path / "flat").mkdir()
    for kind in KINDS:
        for path in (real / kind).iterdir():
            shutil.copy(path, tmp_path / "flat" / f"{kind} {path.name}")
    images = made(tmp_path / "run", ["people"] * 6 + ["art"] * 5)
    result = only(FidMjhq(SPACE, str(real)), images)
    whole = only(FidReal(SPACE, str(tmp_path / "flat")), images).scores["fid_real_scenes"]
    assert result.scores["fid_mjhq_scenes"].value == pytest.approx(whole.value)
    assert result.scores["fid_mjhq_scenes"].ci95 == pytest.approx(whole.ci95)
    assert set(result.scores) == {"fid_mjhq_scenes", "fid_mjhq_scenes/people", "fid_mjhq_scenes/art"}
    for kind, rows in (("people", range(6)), ("art", range(6, 11))):
        part = make_set(tmp_path / kind, [images.image(row) for row in rows])  # the same pixels
        alone = only(FidReal(SPACE, str(real / kind)), part).scores["fid_real_scenes"]
        assert result.scores[f"fid_mjhq_scenes/{kind}"].value == pytest.approx(alone.value, rel=1e-6)
        assert result.scores[f"fid_mjhq_scenes/{kind}"].n == len(rows)
    assert result.reason == "11 samples against 20 real images"
    assert preferences.CATEGORIES == CATEGORIES


def test_what_is_missing_is_told(real: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KVBENCH_WEIGHTS", str(tmp_path / "weights"))
    images = made(tmp_path / "run", ["people", "plants"])
    for folder in (None, str(tmp_path / "nowhere")):
        [result] = evaluate([FidMjhq(SPACE, folder)], images)
        assert result.status == "skipped"
        assert "mjhq30k_imgs.zip, unzip it" in str(result.reason)
    assert "plants is missing" in reason(FidMjhq(SPACE, str(real)), "failed", images)
    shutil.copytree(real, tmp_path / "weights" / "mjhq30k_imgs")
    assert only(FidMjhq(SPACE), made(tmp_path / "people", ["people"] * 2)).scores["fid_mjhq_scenes"].n == 2
    assert "prompts=mjhq30k" in reason(
        FidMjhq(SPACE, str(real)), "skipped", make_noise(tmp_path / "other", [{}, {}])
    )


@pytest.mark.parametrize("case", STORED, ids=lambda case: case["kind"])
def test_both_equal_the_stored_values(case: dict) -> None:
    features = np.array(case["features"])
    assert mean_distance(features) == pytest.approx(case["mean_pairwise_cosine_distance"], abs=1e-9)
    assert vendi_score(features) == pytest.approx(case["q"]["1"], abs=1e-9)


def test_prompts_are_measured_one_by_one_and_resampled_whole(tmp_path: Path) -> None:
    """Two prompts, twice two images of the one and two and a half times two of the other, in mixed order."""
    prompts = ["a", "b", "b", "a", "b", "a", "b", "a", "b"]
    images = make_noise(tmp_path / "run", [{}] * 9, prompts)
    result = only(Diversity(SPACE), images)
    assert list(result.scores) == ["diversity[scenes]", "vendi[scenes,n=4]"]
    twos = make_noise(tmp_path / "twos", [{}] * 8, ["a", "a", "b", "b", "c", "d", "d", "c"])
    assert list(only(Diversity(SPACE), twos).scores) == ["diversity[scenes]", "vendi[scenes,n=2]"]
    network = SceneFeatures.load(FEATURES)
    features = [network.features(to_unit(images.image(i)[None])).detach().numpy()[0] for i in range(9)]
    expected = []
    for group in ([0, 3, 5, 7], [1, 2, 4, 6]):
        cosines = [
            features[i] @ features[j] / np.linalg.norm(features[i]) / np.linalg.norm(features[j])
            for i in group
            for j in group
            if i < j
        ]
        expected.append(1 - float(np.mean(cosines)))
    assert result.samples["index"] == [0, 1]
    assert result.samples["diversity[scenes]"] == pytest.approx(expected, abs=1e-6)
    interval = bootstrap(result.samples["diversity[scenes]"], ["a", "b"]).clip(0, 2)
    assert result.scores["diversity[scenes]"].ci95 == (interval.low, interval.high)
    assert result.reason == "1 images are left over from groups of 4"


def test_a_single_image_of_a_prompt_is_refused(tmp_path: Path) -> None:
    images = make_noise(tmp_path / "run", [{}] * 3, ["a", "a", "b"])
    assert "prompts.per_prompt=4" in reason(Diversity(SPACE), "skipped", images)
    with pytest.raises(ValueError, match="per_prompt=1: must be a whole number of at least 2"):
        Diversity(SPACE, per_prompt=1)
