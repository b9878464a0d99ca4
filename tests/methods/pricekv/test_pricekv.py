"""PriceKV: the calibration against H2O written out, the sale of capacity, and which bases it goes around."""

from dataclasses import replace
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec, next_scale, next_token
from kvbench.engine.schedule import sum_tokens
from kvbench.methods.expected.method import ExpectedAttention
from kvbench.methods.h2o import H2O
from kvbench.methods.lukv.method import LUKV
from kvbench.methods.pricekv.forecast import Forecast
from kvbench.methods.pricekv.greedy import allocate_by_gain, allocate_calibrated
from kvbench.methods.pricekv.method import PriceKV, ScoreErrors
from kvbench.methods.shared.calibration import Artifact
from kvbench.methods.shared.full_scores import list_capacities
from kvbench.methods.snapkv import SnapKV
from tests.support.engine import D, tokens_of, watch
from tests.support.layer_outputs import FOLD, SCALES, TEXTS, attention, both, observe, project


@both
@pytest.mark.parametrize("sinks", [0, 1])
def test_errors_are_those_of_attention_without_what_h2o_drops(spec: ModelSpec, sinks: int) -> None:
    """The oracle's: the largest attention x share of the layer's ||W_o v|| of each past token that is not held."""
    prompts, last, first = 2, len(spec.segments) - 1, spec.leading_tokens(sinks)
    inputs, capacities = tokens_of(spec, prompts * spec.branches, groups=FOLD), list_capacities(spec)
    expected = torch.zeros(2, spec.layers, spec.heads, last, len(capacities), dtype=torch.float64)
    for number, capacity in enumerate(capacities):
        held: dict[tuple[int, ...], list[int]] = {}
        received: dict[tuple[int, ...], Tensor] = {}
        for k, layer in np.ndindex(last + 1, spec.layers):
            at, rows = spec.segments[k], list(attention(spec, inputs, layer, k))
            lengths = [project(v[None, : at.start], spec, layer, head).norm(dim=-1) for _, head, _, v in rows]
            for place, (sequence, head, p, v) in enumerate(rows):
                row = (sequence, layer, head)
                past = held.get(row, [])
                there = [*past, *range(at.start, at.end)]
                if k:
                    left = torch.zeros_like(p)
                    left[..., there] = p[..., there]
                    apart = project(left @ v / left.sum(-1, keepdim=True) - p @ v, spec, layer, head)
                    whole = torch.stack(lengths[sequence * spec.heads : (sequence + 1) * spec.heads]).sum()
                    utility = (p[..., : at.start].amax(1) * lengths[place] / whole).amax(0)
                    utility[past] = 0
                    errors = torch.stack((apart.square().sum((0, -1)).mean(), utility.sum()))
                    expected[:, layer, head, k - 1, number] += errors / prompts / spec.branches
                before = received.get(row, torch.zeros(0).double())
                received[row] = torch.cat((before, torch.zeros(at.length))) + p.mean(0).sum(0)
                worth = received[row].clone()
                worth[:first] = worth[at.end - max(capacity, first, 1) // 2 :] = torch.inf
                held[row] = sorted(there, key=lambda j, worth=worth: (-worth[j].item(), j))[:capacity]
    if spec is TEXTS:
        expected = expected.sum(3, keepdim=True)
    found = observe(ScoreErrors(H2O(sinks=sinks)), spec, [inputs])["error"]
    torch.testing.assert_close(found, expected[0], rtol=1e-3, atol=1e-6)
    assert (found[..., -1] < 1e-9).all()
    assert (found[..., 0] > 0).all()
    found = observe(ScoreErrors(H2O(sinks=sinks), error="oracle"), spec, [inputs])["error"]
    torch.testing.assert_close(found, expected[1], rtol=1e-4, atol=1e-8)
    assert (found[..., 0] > found[..., 5]).all()


def test_retrieval_is_attention_to_distant_tokens_beyond_four_times_the_usual(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvbench.methods.pricekv.method.DISTANT", 3)
    spec = replace(TEXTS, segments=next_token(3, [9, 9, 4]))
    inputs = tokens_of(spec, prompts := 2, groups=FOLD)
    for layer in range(spec.layers):  # scores that differ enough to be beyond the usual
        for segment in inputs:
            segment[layer][0].mul_(6)
    found = observe(ScoreErrors(H2O(), queries=9, retrieval=True), spec, [inputs])["retrieval"]
    expected = torch.zeros_like(found)
    for k, layer in np.ndindex(len(spec.segments), spec.layers):
        for _, head, p, _ in attention(spec, inputs, layer, k) if k else ():
            for one in p:
                for query, row in enumerate(one):
                    far = slice(0, max(0, spec.segments[k].start + query - 3 + 1))
                    beyond = (row - 4 * one.mean(0))[far].clamp(min=0).sum()
                    expected[layer, head] += beyond / one.shape[0] / len(p) / prompts
    assert (expected > 0).all()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)


def test_heads_that_retrieve_hold_whole_texts_and_b_holds() -> None:
    method = PriceKV(base=H2O(), floor=2, retrieval=0.5)
    artifact = method.needs().make_random_artifact(TEXTS)
    artifact.tensors["retrieval"].copy_(torch.tensor([[0.1, 0.4], [0.3, 0.2]]))
    cache = watch(method, TEXTS, tokens_of(TEXTS, 2), 10, artifact).cache
    # Half of 40 tokens is one text of 19 cached tokens.
    assert method.capacities[-1, 0, 1] == TEXTS.cached_length
    assert (method.capacities[-1].flatten()[[0, 2, 3]] < TEXTS.cached_length).all()
    assert cache.ledger.tokens_after == sum_tokens(method.capacities).tolist()
    assert cache.ledger.peak_tokens == method.budget.tokens


def test_a_calibrated_base_is_calibrated_first() -> None:
    base = ExpectedAttention(statistics="calibrated", heads="even")
    inputs = tokens_of(SCALES, 2 * SCALES.branches, groups=FOLD)
    needs = base.needs()
    assert needs is not None
    alone = observe(needs, SCALES, [inputs])
    found = observe(ScoreErrors(base), SCALES, [inputs], passes=2)
    assert {*found} == {*alone, "error"}
    for name, values in alone.items():
        torch.testing.assert_close(found[name], values, rtol=0, atol=0)
    assert (found["error"].diff(dim=-1) <= 1e-2 * found["error"][..., :1]).all()
    method = PriceKV(base=base)
    cache = watch(method, SCALES, inputs, "0.4", Artifact("score_errors", found)).cache
    assert cache.ledger.peak_tokens == method.budget.tokens


@pytest.mark.parametrize(
    ("spec", "method"),
    [
        *product([SCALES, TEXTS], [PriceKV(base=SnapKV()), PriceKV(base=H2O(sinks=1))]),
        (SCALES, PriceKV(base=Forecast())),
        *product([SCALES, TEXTS], [LUKV(base=H2O(), scope="layer"), LUKV(base=H2O(sinks=1), lookup="curve")]),
    ],
)
def test_every_head_holds_what_was_sold_to_it(spec: ModelSpec, method: PriceKV | LUKV) -> None:
    artifact = method.needs().make_random_artifact(spec)
    cache, asked, _ = watch(method, spec, tokens_of(spec, 2 * spec.branches), "0.4", artifact)
    assert cache.ledger.tokens_after == sum_tokens(method.capacities).tolist()
    assert cache.ledger.peak_tokens == method.budget.tokens
    assert len({*method.capacities[-1].flatten().tolist()}) > 1
    condition = [*range(spec.leading_tokens(method.sinks))]
    assert all(row[: len(condition)] == condition for one in asked for row in one.ids())


@st.composite
def sales(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, int, int]:
    heads = draw(st.integers(1, 3))
    reach = np.array(draw(st.lists(st.integers(1, 6), min_size=heads, max_size=heads)))
    total = draw(st.integers(heads, max(heads, int(reach.sum()) - 1)))
    capacities = np.array([0, 1, 3, 4, 6])
    seed, floor = draw(st.integers(0, 10**6)), draw(st.integers(0, total // heads))
    worth = np.minimum.accumulate(np.random.default_rng(seed).random((heads, 5)), -1)
    return worth, capacities, reach, total, floor


def lower_hull(points: list[tuple[int, float]]) -> dict[int, float]:
    """The lower convex hull at whole numbers: the lowest chord between any two points."""
    (first, _), (last, _) = points[0], points[-1]
    return {
        x: min(
            y if b == a else y + (z - y) * (x - a) / (b - a)
            for (a, y), (b, z) in product(points, points)
            if a <= x <= b
        )
        for x in range(first, last + 1)
    }


@given(sales())
@settings(max_examples=150, deadline=None)
def test_no_other_capacities_have_a_lower_error(
    sale: tuple[np.ndarray, np.ndarray, np.ndarray, int, int],
) -> None:
    worth, capacities, reach, total, floor = sale
    if reach.sum() <= total:
        return
    held = allocate_by_gain(worth, capacities, reach, total, floor)
    hulls = []
    for head, most in enumerate(reach.tolist()):
        ends = {min(floor, most), most}
        known = sorted(ends | {c for c in capacities.tolist() if min(ends) < c < most})
        hulls.append(lower_hull([(c, float(np.interp(c, capacities, worth[head]))) for c in known]))
    every = [
        sum(hull[c] for hull, c in zip(hulls, chosen, strict=True))
        for chosen in product(*hulls)
        if sum(chosen) <= total
    ]
    found = sum(hull[c] for hull, c in zip(hulls, held.tolist(), strict=True))
    assert found == pytest.approx(min(every))
    assert held.sum() == total
    assert (held >= np.minimum(floor, reach)).all()
    assert (held <= reach).all()


@given(st.integers(2, 6), st.integers(1, 3), st.integers(1, 3), st.integers(0, 10**6), st.data())
@settings(max_examples=150, deadline=None)
def test_no_instant_exceeds_the_budget(
    segments: int, layers: int, heads: int, seed: int, data: st.DataObject
) -> None:
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=segments, max_size=segments))
    spec = ModelSpec("any", layers, heads, D, next_scale([(1, length) for length in lengths]))
    total = data.draw(st.integers(spec.all_heads, spec.full_tokens))
    floor = data.draw(st.integers(0, total // spec.all_heads))
    capacities, budget = list_capacities(spec), Budget(Fraction(total), spec.full_tokens, spec.all_heads)
    errors = torch.from_numpy(
        np.random.default_rng(seed).random((layers, heads, segments - 1, len(capacities)))
    )
    held = allocate_calibrated(errors, capacities, spec, budget, floor=floor, decay=0.8)
    before = np.zeros((layers, heads), np.int64)
    for length, after in zip(spec.lengths[:-1], held, strict=True):
        assert (after <= before + length).all()
        assert (after >= 0).all()
        for layer in range(layers):
            before[layer] = after[layer]
            assert before.sum() <= total
    assert before.sum() == total or (before == spec.cached_length).all()
    assert (before >= min(floor, spec.cached_length)).all()
