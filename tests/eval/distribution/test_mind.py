"""MIND against loops over directions, and against distances that are known."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import Generator

from kvbench.eval.distribution.dataset import REFERENCE_BATCH
from kvbench.eval.distribution.mind import Mind, MindReal, draw_directions, make_sliced_distance
from kvbench.eval.protocol.intervals import assign_groups
from kvbench.eval.spaces.inception import Adm
from kvbench.eval.spaces.scenes import Scenes
from tests.support.image_sets import FEATURES, make_set, only, pixels

FEW = 7
"""Number of directions."""
NAMES = [f"s64_{i:03d}" for i in range(8)]


def sliced_distance(a: np.ndarray, b: np.ndarray, directions: int = FEW) -> float:
    return make_sliced_distance(a, b, directions, paired=False)(np.arange(len(a)))


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


def test_a_shift_counts_by_three_times_its_square(rng: Generator) -> None:
    """The mean over the sphere of the squared projection of a shift s is |s|^2 / D."""
    a, shift = rng.normal(size=(50, 12)), rng.normal(size=12)
    assert sliced_distance(a, a + shift, 20_000) == pytest.approx(3 * shift @ shift, rel=0.03)


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
    space = Scenes(str(FEATURES))
    ours, theirs = (make_set(tmp_path / side, [pixels(n, side) for n in NAMES]) for side in ("cmp", "ref"))
    a, b = (space.features(side, "cpu").arrays["features"].astype(float) for side in (ours, theirs))
    paired = only(Mind(space, FEW), ours, theirs).scores["mind_scenes"]
    assert paired.value == pytest.approx(slow_mind(a, b), rel=1e-6)
    assert paired.ci is not None
    assert paired.ci.startswith("jackknife")
    assert MindReal(space, None, FEW).weights[1].find() is None  # moments do not suffice
    few = make_set(tmp_path / "few", [pixels(n, "cmp") for n in NAMES[:5]])
    for images, features in ((ours, a), (few, a[:5])):
        real = MindReal(space, str(theirs.folder / "images"), FEW)
        drawn = np.random.default_rng(0).permutation(8)[: len(features)]
        [score] = only(real, images).scores.values()
        assert score.value == pytest.approx(slow_mind(features, b[drawn]), rel=1e-6)


def test_spaces_of_adm_read_the_images_of_its_batch() -> None:
    assert MindReal(Adm()).default == REFERENCE_BATCH
