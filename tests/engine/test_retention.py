"""Shares of what is held, against a count of one token after the other."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch

from kvbench.engine.cache import KVCache
from kvbench.engine.retention import measure_shares
from kvbench.methods.h2o import H2O
from kvbench.methods.hardkv.method import HardKV
from kvbench.methods.shared.base import Method
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.streaming_llm import StreamingLLM
from tests.support.engine import Drawn, DrawnPerSequence, draw_seen, listening, open_cache
from tests.support.steps import draw, generate, shapes

Positions = Sequence[Sequence[Sequence[Sequence[int]]]]
"""What is held, by layer, sequence and head."""


def count(held: Positions, edges: Sequence[int], padding: Sequence[int]) -> list[list[list[float]]]:
    """Shares [L][H][sources], one token at a time."""
    found = []
    for layer in held:
        shares = []
        for head in range(len(layer[0])):
            shares.append([])
            for start, stop in pairwise(edges):
                each = []
                for sequence, missing in zip(layer, padding, strict=True):
                    there = [position for position in range(start, stop) if position >= missing]
                    each.append(sum(position in sequence[head] for position in there) / len(there))
                shares[-1].append(sum(each) / len(each))
        found.append(shares)
    return found


def check(cache: KVCache, held: Positions, edges: Sequence[int], padding: Sequence[int]) -> None:
    kept, counted = measure_shares(cache.held, cache.spec.heads, edges)
    torch.testing.assert_close(
        kept, torch.tensor(count(held, edges, padding), dtype=torch.float64), rtol=0, atol=1e-12
    )
    tokens = [
        sum(max(0, stop - max(start, missing)) for missing in padding) / len(padding)
        for start, stop in pairwise(edges)
    ]
    assert counted.tolist() == pytest.approx(tokens)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Drawn(draw_seen(shapes(), 7, 0.6)),
        lambda: DrawnPerSequence(draw_seen(shapes(), 7, 0.6)),
        lambda: StreamingLLM(sinks=1),
        lambda: SnapKV(window=2, queries="last", sinks=1),
        lambda: H2O(sinks=1),
        lambda: HardKV(window=2, queries=2),
        lambda: HardKV(selector="rkv", window=2, queries=2),
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
        each = [rows[start : start + spec.heads] for start in range(0, len(rows), spec.heads)]
        held.append(
            [[[p for p in row if p >= m] for row in one] for one, m in zip(each, padding, strict=True)]
        )
    for edges in ([0, 6, 11, 16, 21], [0, 6, 8, 21]):
        check(cache, held, edges, padding)


def test_what_ends_early_holds_what_it_held_when_its_last_segment_began() -> None:
    spec = shapes()
    seen = draw_seen(spec, 7, 0.6)
    cache = open_cache(DrawnPerSequence(seen), spec)
    inputs = draw(spec, 2)
    cache.reset(2)
    for segment, steps in zip(spec.segments[:3], (6, 5, 3), strict=True):
        cache.begin(segment)
        for start in range(segment.start, segment.start + steps, steps if not segment.index else 1):
            stop = start + (steps if not segment.index else 1)
            for layer, qkv in enumerate(inputs):
                cache.attend(layer, *(x[:, :, start:stop] for x in qkv))
    held = [
        [[[p for p in range(11) if seen[2, layer, head, p]] for head in range(3)]] * 2 for layer in range(2)
    ]
    assert cache.held.segment is spec.segments[2]
    check(cache, held, [0, 6, 11], [0, 0])
