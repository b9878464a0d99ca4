"""HeatKV: the official builder's schedule and accumulator's orders, what holds for any model, and order files."""

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec, next_scale
from kvbench.engine.schedule import predict_row_lengths, sum_tokens
from kvbench.methods.heatkv.method import BinaryHeatKV, HeatKV
from kvbench.methods.heatkv.order_file import read_orders, write_orders
from kvbench.methods.heatkv.schedule import (
    Schedule,
    count_held_tokens,
    fill_budget,
    schedule_evictions,
)
from kvbench.methods.heatkv.scores import AttentionByScale, cas, rank_heads, scas
from kvbench.methods.shared.calibration import Artifact
from tests.support.engine import small, tokens_of, watch
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


@pytest.mark.parametrize("method", [HeatKV(1, naive=True, fill=True), BinaryHeatKV(1, fill=True)])
def test_fill_leaves_under_a_hundredth_unused(method: HeatKV) -> None:
    """Of what the cache holds during the embedded model's last scale, by the rows that the engine works out."""
    spec = ModelSpec("infinity_tiny", 6, 6, 32, next_scale([(n, n) for n in (1, 2, 3, 4, 5, 6, 8, 10, 12)]))
    budget = Budget.parse("0.04", spec)
    mass = torch.rand(6, 6, 9, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    method.prepare(spec, budget, Artifact(AttentionByScale.kind, {"mass": mass}))
    lengths = predict_row_lengths(spec, method)
    assert lengths is not None
    held = sum_tokens(lengths)
    assert held.max() <= budget.capacity
    assert held[-1].max() >= 0.99 * float(budget.capacity)


def test_budgets_of_tokens_are_read_exactly_and_wrong_ones_are_refused() -> None:
    spec, full = INFINITY["2b"], Fraction(3_289_600)
    for value, capacity in ((1, full), ("650", 650 * 512), ("1/3", full / 3), (0.29, full * 29 / 100)):
        assert Budget.parse(value, spec).capacity == capacity
    for value, why in (
        (0, "positive"),
        (1.5, "whole"),
        (6426, "6425"),
        ("nan", "give a f"),
        ("1/0", "give a f"),
    ):
        with pytest.raises(ValueError, match=why):
            Budget.parse(value, spec)


SMALL = ModelSpec("small", 2, 3, 8, next_scale([(1, 1), (2, 2), (3, 3), (4, 4)]))
SOME_RANKS = rank_heads(torch.rand(2, 3, 4, generator=torch.Generator().manual_seed(0)))


def test_orders_come_back(tmp_path: Path) -> None:
    """With the metadata or without; for as many sinks or more."""
    path = tmp_path / "orders.json"
    write_orders(path, SOME_RANKS, 1, {"model": "small"})
    stored = json.loads(path.read_text())
    assert stored["metadata"] == {"model": "small"}
    for content in (stored, stored["orders"]):
        path.write_text(json.dumps(content))
        for sinks in (1, 2):
            assert np.array_equal(read_orders(path, SMALL, sinks)[sinks:3], SOME_RANKS[sinks:3])
    with pytest.raises(ValueError, match="2 orders, small with sinks=0 needs"):
        read_orders(path, SMALL, 0)
    with pytest.raises(ValueError, match=r"not a permutation of the 8 \[head, layer\] pairs of other"):
        read_orders(path, replace(SMALL, name="other", heads=4), 1)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "cannot be read"),
        ('{"metadata": {}}', "no orders"),
        (json.dumps([[[h, j] for h in range(3) for j in range(2)]] * 4), "but small has fewer sources"),
        (json.dumps([[[h, j] for h in range(2) for j in range(3)]] * 3), "not a permutation of the 6"),
        (json.dumps([[[0, 0], [1]]] * 3), "source scale 0 is not a permutation"),
    ],
)
def test_wrong_order_files_are_refused(content: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "orders.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=rf"method.orders=.*{why}"):
        HeatKV(0, str(path)).check(SMALL, Budget.parse("0.5", SMALL))


def test_a_written_order_makes_the_schedule_of_its_calibration(tmp_path: Path) -> None:
    path = tmp_path / "orders.json"
    mass = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(1)).double()
    write_orders(path, rank_heads(scas(mass)), 1, {})
    budget = Budget.parse("0.4", SMALL)
    read, made = HeatKV(1, str(path)), HeatKV(1)
    read.prepare(SMALL, budget)
    made.prepare(SMALL, budget, Artifact(AttentionByScale.kind, {"mass": mass}))
    assert np.array_equal(read.schedule.absent, made.schedule.absent)
    assert read.schedule.absent.any()


TOY = np.load(GOLDENS / "heatkv" / "scas_toy.npz")


def toy_mass() -> Tensor:
    """Mass of the synthetic attention: the conditional row, mean over queries (in float32) and prompts."""
    lengths = TOY["t"].tolist()
    starts = np.cumsum([0, *lengths])
    mass = torch.zeros(2, 3, 5, 5, dtype=torch.float64)
    for prompt in range(2):
        for k in range(5):
            for layer in range(2):
                probabilities = torch.from_numpy(TOY[f"probs_p{prompt}_k{k}_l{layer}"][0])
                for i in range(k + 1):
                    paid = probabilities[:, :, starts[i] : starts[i + 1]].sum(-1).mean(-1)
                    mass[layer, :, k, i] += paid.double() / 2
    return mass


@pytest.mark.parametrize("sinks", [1, 2])
def test_scores_and_orders_equal_the_official_accumulator(sinks: int) -> None:
    scores, expected = scas(toy_mass()), torch.from_numpy(TOY[f"scores_s{sinks}"])
    eligible = slice(sinks, 4)
    assert (scores[..., eligible] - expected[..., eligible]).abs().max() < 1e-12
    assert scores[..., 4].isnan().all()
    ranks = rank_heads(scores)
    for source, order in zip(range(sinks, 4), TOY[f"orders_s{sinks}"], strict=True):
        for place, (head, layer) in enumerate(order):
            assert ranks[source, layer, head] == place


def test_cas_is_the_last_scale_past_the_sinks() -> None:
    mass = toy_mass()
    for sinks in range(4):
        expected = mass[:, :, 4, sinks:4].sum(-1) / (5 - sinks)
        torch.testing.assert_close(cas(mass, sinks), expected)


def test_ties_go_by_head_then_layer() -> None:
    ranks = rank_heads(torch.zeros(2, 3, 1, dtype=torch.float64))[0]
    assert ranks.tolist() == [[0, 2, 4], [1, 3, 5]]


@pytest.mark.parametrize("method", [HeatKV(2), HeatKV(2, naive=True), BinaryHeatKV(2)])
def test_a_cache_holds_what_the_schedule_says(method: HeatKV) -> None:
    spec = small(layers=4, sides=(1, 2, 3, 4, 5, 6))
    artifact = AttentionByScale().make_random_artifact(spec)
    cache, schedule = watch(method, spec, tokens_of(spec, 2), "0.25", artifact).cache, method.schedule
    # The cache moves on to the next scale's state as soon as a layer ran, so only whole scales compare.
    held = torch.tensor(cache.ledger.tokens_after)
    assert (held <= torch.from_numpy(schedule.cached_after)).all()
    lengths = torch.tensor(spec.lengths)
    for k in range(1, len(spec.segments)):
        present = ~torch.from_numpy(schedule.absent[k, :k])
        assert held[k - 1, -1] == (present.sum((1, 2)) * lengths[:k]).sum()
    assert schedule.absent.any()
