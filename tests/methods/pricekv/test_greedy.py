"""The sale of capacity: against all other capacities, and B at every instant."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.core.segments import ModelSpec, next_scale
from kvbench.methods.pricekv.greedy import allocate_by_gain, allocate_capacities
from kvbench.methods.shared.full_scores import list_capacities
from tests.support.engine import D


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
    capacities = np.array(list_capacities(spec))
    errors = np.random.default_rng(seed).random((segments - 1, spec.all_heads, len(capacities)))
    held = allocate_capacities(errors, capacities, spec, total, floor=floor, decay=0.8)
    before = np.zeros((layers, heads), np.int64)
    for length, after in zip(spec.lengths[:-1], held.reshape(-1, layers, heads), strict=True):
        assert (after <= before + length).all()
        assert (after >= 0).all()
        for layer in range(layers):
            before[layer] = after[layer]
            assert before.sum() <= total
    assert before.sum() == total or (before == spec.cached_length).all()
    assert (before >= min(floor, spec.cached_length)).all()
