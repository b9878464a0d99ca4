"""Shares of what is held, against a count of one token after the other."""

from collections.abc import Callable, Sequence
from itertools import pairwise, product

import pytest
import torch

from kvbench.engine.cache import KVCache
from kvbench.engine.retention import measure_shares
from kvbench.methods.hardkv.method import HardKV
from kvbench.methods.shared.base import Method
from tests.support.engine import Drawn, DrawnPerSequence, draw_seen, listening, open_cache
from tests.support.steps import draw, generate, shapes

Positions = Sequence[Sequence[Sequence[Sequence[int]]]]
"""What is held, by layer, sequence and head."""


def count(layer: Sequence[Sequence[Sequence[int]]], head: int, span: range, padding: Sequence[int]) -> float:
    """The share of a source's tokens that a head holds, one token at a time; the mean over sequences."""
    found = []
    for sequence, missing in zip(layer, padding, strict=True):
        there = [position for position in span if position >= missing]
        found.append(sum(position in sequence[head] for position in there) / len(there))
    return sum(found) / len(found)


def check(cache: KVCache, held: Positions, edges: Sequence[int], padding: Sequence[int]) -> None:
    kept, counted = measure_shares(cache.held, cache.spec.heads, edges)
    spans, heads = [range(*pair) for pair in pairwise(edges)], range(cache.spec.heads)
    expected = [[[count(layer, head, span, padding) for span in spans] for head in heads] for layer in held]
    torch.testing.assert_close(kept, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)
    tokens = [sum(position >= missing for position in span for missing in padding) for span in spans]
    assert counted.tolist() == pytest.approx([one / len(padding) for one in tokens])


@pytest.mark.parametrize(
    "make",
    [
        lambda: Drawn(draw_seen(shapes(), 7, 0.6)),
        lambda: DrawnPerSequence(draw_seen(shapes(), 7, 0.6)),
        lambda: HardKV(window=2, queries=2),
    ],
)
@pytest.mark.parametrize("padding", [[0, 0, 0], [2, 0, 5]])
def test_rows_behind_padded_prompts(make: Callable[[], Method], padding: list[int]) -> None:
    """What the last answers before the last segment come to; of a static method those of one sequence."""
    method, spec = make(), shapes()
    cache, asked = open_cache(method, spec, 1 if isinstance(method, Drawn) else 0.5), listening(method)
    generate(cache, draw(spec, 3), padding)
    if method.static:  # asked once, of one sequence and of no padding
        asked = [one for one in asked if len(one.kept) == spec.heads]
    last = {one.layer: one.ids() for one in asked if one.scale == len(spec.segments) - 2}
    held = []
    for layer in range(spec.layers):
        rows = last[layer] * 3 if method.static else last[layer]
        each = zip(zip(*[iter(rows)] * spec.heads, strict=True), padding, strict=True)
        held.append([[[p for p in row if p >= missing] for row in one] for one, missing in each])
    for edges in ([0, 6, 11, 16, 21], [0, 6, 8, 21]):
        check(cache, held, edges, padding)


def test_what_ends_early_holds_what_it_held_when_its_last_segment_began() -> None:
    spec, seen = shapes(), draw_seen(shapes(), 7, 0.6)
    cache, inputs = open_cache(DrawnPerSequence(seen), spec), draw(spec, 2)
    cache.reset(2)
    for segment, stop, size in zip(spec.segments[:3], (6, 11, 14), (6, 1, 1), strict=True):
        cache.begin(segment)
        for start, layer in product(range(segment.start, stop, size), range(spec.layers)):
            cache.attend(layer, *(x[:, :, start : start + size] for x in inputs[layer]))
    held = [
        [[[p for p in range(11) if seen[2, layer, head, p]] for head in range(3)]] * 2 for layer in range(2)
    ]
    assert cache.held.segment is spec.segments[2]
    check(cache, held, [0, 6, 11], [0, 0])
