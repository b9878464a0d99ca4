"""Shared parts of methods: shares, windows, smoothing, the best slots, competing heads, tokens set aside."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec, Segment, next_scale
from kvbench.methods.h2o import H2O
from kvbench.methods.pyramidkv import PyramidKV
from kvbench.methods.scale_groups import ScaleGroups
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.capacities import share_evenly
from kvbench.methods.shared.grouped import choose_among_heads
from kvbench.methods.shared.hook_results import NotANumber
from kvbench.methods.shared.select import (
    choose_best,
    choose_window,
    fit_window,
    softmax_seen,
)
from kvbench.methods.shared.view import View
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.tova import TOVA
from tests.support.engine import open_cache, run, small, tokens_of, watch

SPEC = small(layers=2, sides=(1, 2, 3, 4, 5, 6), scale=0.8)


@given(st.integers(1, 5), st.integers(1, 4), st.data())
def test_an_even_share_leaves_no_token(layers: int, heads: int, data: st.DataObject) -> None:
    spec = ModelSpec("any", layers, heads, 2, next_scale([(1, 1), (2, 2), (3, 3)]))
    tokens = data.draw(st.integers(1, spec.full_tokens))
    rooms = share_evenly(tokens, spec)
    each = [room if isinstance(room, tuple) else (room,) * heads for room in rooms]
    flat = [room for layer in each for room in layer]
    assert sum(flat) == tokens
    assert flat == sorted(flat, reverse=True)
    assert max(flat) - min(flat) <= 1
    assert all(isinstance(room, int) or len(set(room)) == 2 for room in rooms)


@given(st.integers(1, 12), st.integers(1, 12), st.sampled_from((1, 4, 9, 16)))
def test_a_grid_lies_at_the_centres_of_its_patches(height: int, width: int, count: int) -> None:
    at, side = Segment(3, 100, height, width), int(count**0.5)
    found = choose_window("grid", at, count).tolist()
    if min(height, width) < max(side, 2):  # a row is no map
        assert found == list(range(max(0, height * width - count), height * width))
        return
    expected = []
    for i in range(side):
        for j in range(side):
            patch = [height // side, width // side]
            row, column = i * patch[0] + (patch[0] - 1) // 2, j * patch[1] + (patch[1] - 1) // 2
            expected.append(row * width + column)
    assert found == sorted(expected) == expected


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 40))
def test_last_and_uniform_windows(height: int, width: int, count: int) -> None:
    at, tokens = Segment(0, 0, height, width), height * width
    assert choose_window("last", at, count).tolist() == list(range(tokens))[-count:]
    found = choose_window("uniform", at, count).tolist()
    assert len(set(found)) == len(found) == min(count, tokens)
    steps = [b - a for a, b in zip(found, [*found[1:], tokens], strict=True)]
    assert found[0] == 0
    assert max(steps) - min(steps) <= 1


@given(st.sampled_from((1, 4, 9, 16, 25)), st.integers(1, 100))
def test_a_window_leaves_half_of_a_small_room(wanted: int, room: int) -> None:
    half = max(room // 2, 1)
    largest = max(side * side for side in range(1, 8) if side * side <= half)
    assert fit_window(wanted, room) == (wanted if 2 * wanted <= room else largest)


@given(st.lists(st.lists(st.integers(0, 3), min_size=6, max_size=6), min_size=1, max_size=4), st.data())
def test_the_best_slots(rows: list[list[int]], data: st.DataObject) -> None:
    rooms = data.draw(st.lists(st.integers(0, 8), min_size=len(rows), max_size=len(rows)))
    found = choose_best(torch.tensor(rows, dtype=torch.float32), torch.tensor(rooms))
    for row, room, kept in zip(rows, rooms, found, strict=True):
        order = sorted(range(6), key=lambda i: (-row[i], i))
        assert kept.nonzero().squeeze(1).tolist() == sorted(order[:room])
    assert choose_best(torch.tensor(rows, dtype=torch.float32), 2).sum(1).tolist() == [2] * len(rows)


@pytest.mark.parametrize("kind", [SnapKV, H2O])
def test_who_decides(kind: type[Method]) -> None:
    kept = {}
    inputs = tokens_of(SPEC, 4, seed=2)
    for rows in ("per_row", "mean", "conditional"):
        seen = watch(kind(branch_mode=rows, sinks=1), SPEC, inputs, "0.4").asked
        halves = [(asked.ids()[: 2 * SPEC.heads], asked.ids()[2 * SPEC.heads :]) for asked in seen]
        assert all(mine == twin for mine, twin in halves) == (rows != "per_row")
        kept[rows] = [mine for mine, _ in halves]
    assert kept["conditional"] == kept["per_row"]  # of the conditional sequences
    assert kept["mean"] != kept["conditional"]


def test_scores_that_are_nan_end_the_run_in_one_line() -> None:
    class Broken(TOVA):
        def score(self, view: View) -> Tensor:
            return super().score(view) * (torch.nan if view.layer == 1 and view.segment.index == 2 else 1)

    spec = small()
    cache = open_cache(Broken(), spec, 0.5)
    with pytest.raises(NotANumber, match=r"^method=Broken: layer 1, segment 2: scores are NaN"):
        run(cache, tokens_of(spec, 2))


def test_a_softmax_of_nothing_is_zero_and_of_nan_is_nan() -> None:
    inf = torch.inf
    rows = torch.tensor([[0.0, -inf], [-inf, -inf], [torch.nan, -inf], [torch.nan, 0.0]])
    found = softmax_seen(rows)
    assert found[:2].tolist() == [[1, 0], [0, 0]]
    assert found[2:].isnan().all()


PYRAMID = small(layers=4, heads=3, sides=(1, 2, 3, 4, 5))


@given(st.fractions(Fraction(1, 25), 1, max_denominator=200), st.integers(0, 2))
def test_pyramidkv_deals_out_every_token_of_the_budget(share: Fraction, sinks: int) -> None:
    budget = Budget.parse(str(max(share, Fraction(6, PYRAMID.cached_length))), PYRAMID)
    method = PyramidKV(sinks=sinks)
    method.prepare(PYRAMID, budget)
    rooms = [method.share(layer, PYRAMID.segments[-2]) for layer in range(PYRAMID.layers)]
    totals = [PYRAMID.heads * room if isinstance(room, int) else sum(room) for room in rooms]
    assert sum(totals) == budget.tokens
    assert totals == sorted(totals, reverse=True)
    assert min(totals) >= PYRAMID.heads * PYRAMID.leading_tokens(sinks)
    assert max(totals) <= PYRAMID.heads * PYRAMID.cached_length


@given(st.integers(0, 10**6), st.integers(0, 9), st.floats(0, 1))
def test_heads_compete_as_written_out(seed: int, room: int, safeguard: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 6, (4, 9), generator=generator).float()  # with ties
    exists = torch.rand(4, 9, generator=generator) < 0.8
    scores[~exists] = -torch.inf
    chosen = choose_among_heads(scores, room, 2, safeguard)
    for rows in ((0, 1), (2, 3)):
        slots = [(row, slot) for row in rows for slot in range(9) if exists[row, slot]]
        safe = set()
        for row in rows:
            own = sorted((s for s in slots if s[0] == row), key=lambda s: (-float(scores[s]), s))
            least = 1 if safeguard > 0 else 0
            safe |= set(own[: min(room, max(least, int(safeguard * room)))])
        rest = sorted((s for s in slots if s not in safe), key=lambda s: (-float(scores[s]), s))
        expected = safe | set(rest[: 2 * room - len(safe)])
        assert {(row, slot) for row in rows for slot in range(9) if chosen[row, slot]} == expected


@pytest.mark.parametrize(
    ("remove", "left"),
    [
        ("none", {0, 1, 2, 3, 4}), ("condensed", {2, 3, 4}), ("intermediate", {0, 1, 3, 4}),
        ("local", {0, 1, 2}), ("all", set()),
    ],
)  # fmt: skip
def test_scale_groups_leave_one_group_out(remove: str, left: set[int]) -> None:
    seen = watch(ScaleGroups(remove), SPEC, tokens_of(SPEC, 2)).asked
    for asked in seen:
        expected = [
            p for s in SPEC.segments[: asked.scale + 1] if s.index in left for p in range(s.start, s.end)
        ]
        assert asked.ids() == [expected] * len(asked.position)
    assert len(seen) == SPEC.layers * 5
