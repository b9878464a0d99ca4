"""HeatKV's schedule: equal to the official builder's in every atom; what holds for any model and budget."""

from fractions import Fraction
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvbench.core.budget import Budget, InfeasibleBudget
from kvbench.core.segments import ModelSpec, next_scale
from kvbench.engine.schedule import predict_row_lengths, sum_tokens
from kvbench.methods.heatkv.method import BinaryHeatKV, HeatKV
from kvbench.methods.heatkv.schedule import (
    Schedule,
    count_held_tokens,
    count_pruned_heads,
    fill_budget,
    schedule_evictions,
)
from kvbench.methods.heatkv.scores import AttentionByScale
from kvbench.methods.shared.calibration import Artifact
from tests.support.places import GOLDENS
from tests.support.published import INFINITY, SIDES

GOLDEN = GOLDENS / "heatkv"
OFFICIAL = sorted(path.stem for path in GOLDEN.glob("official_*.npz"))
PAPER = sorted(path.stem for path in GOLDEN.glob("paper_*.npz"))


def official_ranks(model: str, sinks: int) -> NDArray[np.int64]:
    """Published places; where sinks=1 needs sources 1 and 2, which have none, they share those of source 3."""
    places = np.load(GOLDEN / f"orders_{model}.npz")["rank"]
    ranks = np.zeros((len(SIDES), *places.shape[1:]), np.int64)
    ranks[3:-1] = places
    if sinks == 1:
        ranks[1:3] = places[0]
    return ranks


def build(name: str) -> tuple[Schedule, Budget, dict[str, NDArray[np.generic]]]:
    stored = dict(np.load(GOLDEN / f"{name}.npz"))
    model = "2b" if "_2b_" in name else "8b"
    spec, sinks = INFINITY[model], int(stored["s"])
    budget = Budget.parse(str(round(float(stored["budget"]), 4)), spec)
    naive = "naive" in name
    rank = stored["O_rank"].astype(np.int64) if "O_rank" in stored else official_ranks(model, sinks)
    return schedule_evictions(spec, budget, sinks, rank, naive=naive), budget, stored


def unpacked(stored: dict[str, NDArray[np.generic]], name: str) -> NDArray[np.bool_]:
    shape = tuple(stored["shape"].astype(int))
    bits = np.unpackbits(stored[name].astype(np.uint8), count=int(np.prod(shape)))
    return bits.reshape(shape).astype(np.bool_)


def test_all_references_are_there() -> None:
    assert len(OFFICIAL) == 8
    assert len(PAPER) == 6


@pytest.mark.parametrize("name", [*OFFICIAL, *PAPER])
def test_equals_the_reference(name: str) -> None:
    made, budget, stored = build(name)
    absent = unpacked(stored, "A")
    for k in range(len(SIDES)):
        assert np.array_equal(made.absent[k, :k], absent[k, :k]), f"A differs at scale {k}"
    assert np.array_equal(made.gone, unpacked(stored, "G"))
    assert np.array_equal(made.pruned, stored["N"])
    assert np.array_equal(made.cached_after, stored["cached_after"])
    assert made.cached_after.max() <= budget.capacity
    assert float(budget.capacity) == pytest.approx(float(stored["B"]), abs=1e-6)


def test_early_evictions_of_two_billion_at_four_percent() -> None:
    made, _, _ = build("official_heatkv_2b_s3_b04")
    assert made.early[6:12].tolist() == [82, 74, 37, 30, 30, 9]
    ten, _, _ = build("official_heatkv_2b_s3_b10")
    assert ten.early[8:12].tolist() == [99, 67, 28, 43]


class Case(NamedTuple):
    """A random small model with a feasible budget and an order."""

    spec: ModelSpec
    sinks: int
    budget: Budget
    ranks: NDArray[np.int64]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    layers, heads = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    sizes = draw(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=2, max_size=6))
    spec = ModelSpec("random", layers, heads, 4, next_scale(sizes))
    sinks = draw(st.integers(0, len(sizes) - 1))
    share = draw(st.fractions(Fraction(1, 50), 1, max_denominator=100))
    budget = Budget.parse(str(share), spec)
    assume(budget.per_head >= (spec.ends[sinks - 1] if sinks else 0))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    ranks = np.stack([rng.permutation(spec.all_heads).reshape(layers, heads) for _ in sizes])
    return Case(spec, sinks, budget, ranks)


def schedules(case: Case) -> list[Schedule]:
    spec, sinks, budget, ranks = case
    return [
        schedule_evictions(spec, budget, sinks, rank, naive=naive)
        for rank in (ranks, ranks[0])
        for naive in (False, True)
    ]


@given(cases())
@settings(max_examples=150, deadline=None)
def test_schedules_are_strict_nested_and_just_in_time(case: Case) -> None:
    spec, sinks, budget, _ = case
    late, naive, late_heads, naive_heads = made = schedules(case)
    for one in made:
        assert one.cached_after.max() <= budget.capacity
        for k in range(len(spec.segments) - 1):
            assert not (one.gone[k] & ~one.gone[k + 1]).any(), "a pruned atom came back"
            present_later = one.gone[k, : k + 1] & ~one.absent[k + 1, : k + 1]
            assert not present_later.any(), "gone, yet present a scale later"
            early = one.absent[k + 1, : k + 1] & ~one.gone[k + 1, : k + 1]
            assert not early.any(), "an eviction anticipates a later scale"
        assert not one.gone[:, :sinks].any()
        assert not one.absent[:, :sinks].any()
        assert np.array_equal(one.cached_after, count_held_tokens(spec, one.gone, one.absent))
    assert (naive.cached_after <= late.cached_after).all()
    assert (naive_heads.cached_after <= late_heads.cached_after).all()
    assert np.array_equal(naive.gone, late.gone)
    for one in schedules(case._replace(budget=Budget.parse(1, spec))):
        assert not one.absent.any()
        assert not one.gone.any()
        assert one.cached_after.max() == spec.full_tokens


@given(cases())
@settings(max_examples=100, deadline=None)
@pytest.mark.slow
def test_a_filled_schedule_keeps_more_and_stays_strict(case: Case) -> None:
    spec, _, budget, ranks = case
    for one, rank in zip(schedules(case), (ranks, ranks, ranks[0], ranks[0]), strict=True):
        filled = fill_budget(spec, budget, one, rank)
        assert filled.cached_after.max() <= budget.capacity
        assert np.array_equal(filled.cached_after, count_held_tokens(spec, filled.gone, filled.absent))
        assert not (filled.absent & ~one.absent).any(), "kept without fill, not with it"
        assert not (filled.gone & ~one.gone).any()
        for k in range(len(spec.segments) - 1):
            assert not (filled.gone[k] & ~filled.gone[k + 1]).any(), "a pruned atom came back"
            assert not (filled.gone[k] & ~filled.absent[k + 1])[: k + 1].any()
            ahead = filled.absent[k + 1, : k + 1] & ~filled.gone[k, : k + 1]
            assert filled.early[k + 1] == ahead.sum()
        for atom in np.argwhere(filled.absent[-1]):  # another one would exceed B somewhere
            gone, absent = filled.gone.copy(), filled.absent.copy()
            for state in (gone, absent):
                state[atom[0] :, *atom] = False
            assert count_held_tokens(spec, gone, absent).max() > budget.capacity


@pytest.mark.parametrize("share", ["0.04", "0.1", "0.2"])
@pytest.mark.parametrize("kind", [HeatKV, BinaryHeatKV])
@pytest.mark.parametrize("naive", [False, True])
def test_fill_leaves_under_a_hundredth_unused(kind: type[HeatKV], naive: bool, share: str) -> None:
    """Of what the cache holds during the embedded model's last scale, by the rows that the engine works out."""
    spec = ModelSpec("infinity_tiny", 6, 6, 32, next_scale([(n, n) for n in (1, 2, 3, 4, 5, 6, 8, 10, 12)]))
    budget = Budget.parse(share, spec)
    mass = torch.rand(6, 6, 9, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    method = kind(1, naive=naive, fill=True)
    method.prepare(spec, budget, Artifact(AttentionByScale.kind, {"mass": mass}))
    lengths = predict_row_lengths(spec, method)
    assert lengths is not None
    held = sum_tokens(lengths)
    assert held.max() <= budget.capacity
    assert held[-1].max() >= 0.99 * float(budget.capacity)


@pytest.mark.parametrize(
    ("sinks", "smallest"), [(1, 0.00016), (3, 0.00327), (4, 0.00888), (6, 0.04125), (7, 0.08109)]
)
def test_an_infeasible_budget_names_the_smallest_feasible(sinks: int, smallest: float) -> None:
    spec = INFINITY["2b"]
    with pytest.raises(InfeasibleBudget, match="the smallest feasible budget is") as caught:
        count_pruned_heads(spec, Budget.parse("0.0001", spec), sinks)
    named = str(caught.value).split("budget is ")[1].split(",")[0]
    assert float(named) == pytest.approx(smallest, abs=1e-5)
    count_pruned_heads(spec, Budget.parse(named, spec), sinks)
    with pytest.raises(InfeasibleBudget):
        count_pruned_heads(spec, Budget.parse(str(Fraction(named) - Fraction(1, 10**5)), spec), sinks)


@pytest.mark.parametrize(
    ("value", "capacity"),
    [
        (0.1, Fraction(328_960)), ("0.04", Fraction(131_584)), (1, Fraction(3_289_600)),
        (650, Fraction(650 * 512)), ("650", Fraction(650 * 512)), (6425, Fraction(3_289_600)),
        ("1/3", Fraction(3_289_600, 3)), (0.29, Fraction(29, 100) * 3_289_600),
    ],
)  # fmt: skip
def test_a_budget_is_read_exactly(value: float | str, capacity: Fraction) -> None:
    budget = Budget.parse(value, INFINITY["2b"])
    assert budget.capacity == capacity
    assert budget.per_head == capacity / 512
    assert budget.fraction == capacity / 3_289_600
    assert budget.tokens == int(capacity)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (0, "positive"), (-0.1, "positive"), (1.5, "whole"), (6426, "6425"),
        *((value, "give a fraction") for value in ("x", "nan", "inf", "1/0", "")),
    ],
)  # fmt: skip
def test_a_wrong_budget_is_refused(value: float | str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Budget.parse(value, INFINITY["2b"])
