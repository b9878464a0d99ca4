"""PyramidKV's rooms and AdaKV's competition, beside slow references."""

from fractions import Fraction
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.budget import Budget
from kvbench.methods.pyramidkv import PyramidKV, slope_layers
from kvbench.methods.shared.grouped import choose_among_heads
from tests.support.engine import prepared, small

SPEC = small(layers=4, heads=3, sides=(1, 2, 3, 4, 5))


@given(st.fractions(0, 60, max_denominator=40), st.integers(1, 40), st.floats(1, 50), st.integers(60, 90))
def test_a_slope_falls_in_equal_steps_and_has_the_mean(
    mean: Fraction, layers: int, beta: float, upper: int
) -> None:
    rooms = slope_layers(mean, layers, beta, upper)
    assert sum(rooms) == mean * layers
    assert len({a - b for a, b in pairwise(rooms)}) <= 1
    assert all(0 <= room <= upper for room in rooms)
    assert rooms == sorted(rooms, reverse=True)


@given(st.fractions(Fraction(1, 25), 1, max_denominator=200), st.integers(0, 2))
def test_pyramidkv_deals_out_every_token_of_the_budget(share: Fraction, sinks: int) -> None:
    budget = Budget.parse(str(max(share, Fraction(6, SPEC.cached_length))), SPEC)
    method = PyramidKV(sinks=sinks)
    method.prepare(SPEC, budget)
    rooms = [method.share(layer, SPEC.segments[-2]) for layer in range(SPEC.layers)]
    totals = [SPEC.heads * room if isinstance(room, int) else sum(room) for room in rooms]
    assert sum(totals) == budget.tokens
    assert totals == sorted(totals, reverse=True)
    assert min(totals) >= SPEC.heads * SPEC.leading_tokens(sinks)
    assert max(totals) <= SPEC.heads * SPEC.cached_length


def test_pyramidkv_with_beta_1_is_snapkv_s_even_share() -> None:
    method = prepared(PyramidKV(beta=1), SPEC, "10")
    assert [method.share(layer, SPEC.segments[-2]) for layer in range(SPEC.layers)] == [10] * 4


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
