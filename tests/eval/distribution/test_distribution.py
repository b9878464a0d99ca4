"""Distances between distributions against stored references and slow re-derivations."""

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.eval.distribution.frechet import frechet_distance, frechet_to, moments
from kvbench.eval.distribution.inception_score import inception_score
from kvbench.eval.distribution.kid import Kid, draw_subsets, kid
from kvbench.eval.distribution.mind import make_sliced_distance
from kvbench.eval.distribution.precision_recall import NEIGHBOUR, leave_groups_out
from kvbench.eval.protocol.intervals import assign_groups
from tests.support.image_sets import ARRAYS, EXPECTED

REF, CMP = ARRAYS["features_ref"], ARRAYS["features_cmp"]

# Frechet distance


def test_frechet_distance_equals_the_stored_values() -> None:
    stored = EXPECTED["fid"]
    assert frechet_distance(REF, CMP) == pytest.approx(stored["linear16_paired"]["mpmath40"], abs=1e-12)
    assert frechet_distance(REF[:40], CMP[20:]) == pytest.approx(
        stored["linear16_unpaired_40_44"]["mpmath40"], abs=1e-12
    )
    deficient = frechet_distance(ARRAYS["rank_deficient_ref"], ARRAYS["rank_deficient_cmp"])
    assert deficient == pytest.approx(stored["rank_deficient_24x48"]["mpmath40"], abs=1e-12)
    assert abs(frechet_distance(REF, REF)) < 1e-9


@given(
    n=st.integers(2, 30),
    m=st.integers(2, 30),
    dim=st.integers(1, 12),
    seed=st.integers(0, 99),
    shift=st.floats(0, 3),
)
@settings(max_examples=40, deadline=None)
def test_both_routes_agree_on_a_distance(n: int, m: int, dim: int, seed: int, shift: float) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(n, dim)), rng.normal(shift, 2, size=(m, dim))
    value = frechet_distance(a, b)
    gaussians = [torch.from_numpy(part) for x in (a, b) for part in (x.mean(0), np.atleast_2d(np.cov(x.T)))]
    for ours, theirs in zip((*moments(a), *moments(b)), gaussians, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-12)
    assert value == pytest.approx(frechet_to(*gaussians[2:])(a), abs=1e-6 * (1 + abs(value)))
    assert value == pytest.approx(frechet_distance(b, a), abs=1e-9 * (1 + abs(value)))
    assert value > -1e-9
    assert frechet_distance(a, a + shift) == pytest.approx(dim * shift**2, abs=1e-8)


# Kernel distance


def slow_kid(a: np.ndarray, b: np.ndarray, *, paired: bool) -> float:
    """The definition, one pair of samples at a time."""

    def mean(x: np.ndarray, y: np.ndarray, *, hollow: bool) -> float:
        found = [
            (float(x[i] @ y[j]) / x.shape[1] + 1) ** 3
            for i in range(len(x))
            for j in range(len(y))
            if not (hollow and i == j)
        ]
        return math.fsum(found) / len(found)

    return mean(a, a, hollow=True) + mean(b, b, hollow=True) - 2 * mean(a, b, hollow=paired)


def test_kid_equals_the_stored_values() -> None:
    stored = EXPECTED["kid"]
    assert kid(REF, CMP) == pytest.approx(stored["full_unbiased"], abs=1e-12)
    assert kid(REF, CMP, paired=True) == pytest.approx(stored["full_paired_ustat"], abs=1e-12)
    assert kid(REF, REF) == pytest.approx(stored["same_set_full_unbiased"], abs=1e-12)
    assert kid(REF, REF, paired=True) == pytest.approx(0, abs=1e-12)
    assert kid(REF[:40], CMP[20:]) == pytest.approx(stored["unpaired_40_44"], abs=1e-12)
    subsets = [kid(REF[a], CMP[b]) for a, b in ARRAYS["kid_subsets"]]
    assert np.mean(subsets) == pytest.approx(stored["subsets10_size32_mean"], abs=1e-12)
    assert np.std(subsets) == pytest.approx(stored["subsets10_size32_std_ddof0"], abs=1e-12)


def test_the_jackknife_of_kid_leaves_groups_out_of_both_sides() -> None:
    prompts = [str(row // 2) for row in range(64)]
    [score] = Kid().compare(REF, CMP, prompts)
    assert score.value == pytest.approx(1000 * EXPECTED["kid"]["full_paired_ustat"], abs=1e-9)
    dealt = assign_groups(prompts)
    without = np.array([slow_kid(REF[dealt != g], CMP[dealt != g], paired=True) for g in range(20)])
    expected = np.sqrt(19 / 20 * np.square(without - without.mean()).sum())
    assert score.se == pytest.approx(1000 * expected, rel=1e-9)


def test_many_samples_take_subsets_by_seed_and_without_replacement() -> None:
    [score] = Kid(full_up_to=10, subsets=40, size=6).compare(REF, CMP, list(map(str, range(64))))
    draws = draw_subsets(64, 40, 6)
    assert all(len(set(draw)) == 6 for draw in draws)
    assert score.value == pytest.approx(np.mean([1000 * kid(REF[d], CMP[d], paired=True) for d in draws]))
    assert score.ci == "subsampling 40 of 6 seed 0"


# Precision and recall


def slow_precision(sample: np.ndarray, real: np.ndarray, k: int = 3) -> float:
    """Share of samples inside a ball, one distance at a time."""
    radii = [
        sorted(float(np.square(r - s).sum()) for j, s in enumerate(real) if j != i)[k - 1]
        for i, r in enumerate(real)
    ]
    inside = [
        any(np.square(x - r).sum() <= radius for r, radius in zip(real, radii, strict=True)) for x in sample
    ]
    return sum(inside) / len(inside)


def precision_recall(sample: np.ndarray, real: np.ndarray) -> tuple[float, float]:
    (precision,), (recall,) = leave_groups_out(sample, real, NEIGHBOUR, (None, None))
    return precision, recall


def test_precision_and_recall_equal_the_stored_values() -> None:
    stored = EXPECTED["precision_recall"]
    found = precision_recall(ARRAYS["pr_sample"], ARRAYS["pr_ref"])
    assert found == (stored["gauss_96_80_dim8"]["precision"], stored["gauss_96_80_dim8"]["recall"])
    kept = [row for row in range(64) if row not in (10, 11, 30, 31)]
    ref, cmp = REF[[row for row in kept if row < 40]], CMP[20:][[row for row in kept if row < 44]]
    found = precision_recall(cmp, ref)
    assert found == (stored["linear16_unpaired"]["precision"], stored["linear16_unpaired"]["recall"])


@given(n=st.integers(6, 16), m=st.integers(6, 16), seed=st.integers(0, 99), paired=st.booleans())
@settings(max_examples=25, deadline=None)
def test_leaving_groups_out_equals_computing_again(n: int, m: int, seed: int, paired: bool) -> None:
    rng = np.random.default_rng(seed)
    m = n if paired else m
    sample, real = rng.normal(size=(n, 2)), rng.normal(0.5, size=(m, 2))
    dealt = rng.permutation(n) % 4
    precision, recall = leave_groups_out(sample, real, 2, (dealt, dealt if paired else None))
    for group in (-1, *range(4)):
        ours, theirs = sample[dealt != group], real[dealt != group] if paired else real
        if min(len(ours), len(theirs)) > 2:
            assert precision[group + 1] == slow_precision(ours, theirs, 2)
            assert recall[group + 1] == slow_precision(theirs, ours, 2)


def test_equal_sets_cover_each_other_even_when_all_points_are_one() -> None:
    points = 100 + np.random.default_rng(0).normal(size=(30, 64))
    one = np.repeat(points[:1], 12, 0)
    assert precision_recall(points, points) == precision_recall(one, one) == (1, 1)
    assert precision_recall(points + 50, points) == (0, 0)


# Inception Score


def test_inception_score_equals_the_stored_values() -> None:
    logits, stored = ARRAYS["is_logits"], EXPECTED["inception_score"]
    assert inception_score(logits, 60) == pytest.approx([stored["splits1"]["mean"]], abs=1e-9)
    assert inception_score(logits, 15) == pytest.approx(stored["splits4"]["per_split"], abs=1e-9)
    ordered = logits[np.argsort(logits.argmax(1), kind="stable")]
    assert inception_score(ordered, 15).mean() == pytest.approx(
        stored["splits4_sorted_by_class"]["mean"], abs=1e-9
    )


# Bad input


def slice_both(first: np.ndarray, second: np.ndarray) -> object:
    return make_sliced_distance(first, second, 2, paired=False)


@pytest.mark.parametrize(
    ("function", "minimum"),
    [(frechet_distance, 2), (kid, 2), (slice_both, 2), (precision_recall, 4)],
    ids=lambda f: str(f)[:20],
)
def test_bad_features_are_refused(function: Callable[..., object], minimum: int) -> None:
    good = np.random.default_rng(0).normal(size=(6, 3))
    with pytest.raises(ValueError, match=f"at least {minimum} samples are needed"):
        function(good[: minimum - 1], good)
    with pytest.raises(ValueError, match="3 and 2 dimensions"):
        function(good, good[:, :2])
    for wrong in (math.nan, math.inf):
        bad = good.copy()
        bad[2, 1] = wrong
        with pytest.raises(ValueError, match="sample 2 are not finite"):
            function(good, bad)


def test_bad_logits_and_unequal_pairs_are_refused() -> None:
    with pytest.raises(ValueError, match="sample 1 are not finite"):
        inception_score(np.array([[0.0], [math.nan]]), 5)
    for refuse in (kid, partial(make_sliced_distance, projections=2)):
        with pytest.raises(ValueError, match="paired sets have 3 and 4 samples"):
            refuse(np.zeros((3, 2)), np.zeros((4, 2)), paired=True)
