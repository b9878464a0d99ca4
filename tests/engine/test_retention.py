"""Shares of what is held, against a count of one token after the other."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.engine.cache import KVCache
from kvbench.engine.retention import measure_shares
from kvbench.methods.base import Method
from kvbench.methods.h2o import H2O
from kvbench.methods.hardkv.method import HardKV
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.streaming_llm import StreamingLLM
from tests.support.engine import (
    Drawn,
    DrawnPerSequence,
    draw_seen,
    listening,
    open_cache,
    prepared,
    run,
    small,
    tokens_of,
)
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
    shares = measure_shares(cache.held, cache.spec.heads, edges)
    torch.testing.assert_close(
        shares.kept, torch.tensor(count(held, edges, padding), dtype=torch.float64), rtol=0, atol=1e-12
    )
    tokens = [
        sum(max(0, stop - max(start, missing)) for missing in padding) / len(padding)
        for start, stop in pairwise(edges)
    ]
    assert shares.tokens.tolist() == pytest.approx(tokens)


@pytest.mark.parametrize("kind", [Drawn, DrawnPerSequence])
@given(seed=st.integers(0, 10**6), share=st.sampled_from((0.0, 0.3, 0.9)), sequences=st.integers(1, 3))
@settings(max_examples=15, deadline=None)
def test_scales(kind: type[Drawn], seed: int, share: float, sequences: int) -> None:
    spec = small()
    seen = draw_seen(spec, seed, share)
    cache = open_cache(kind(seen), spec)
    for _ in range(2):
        run(cache, tokens_of(spec, sequences, seed))
        at = spec.segments[-1]
        held = [
            [[seen[-1, layer, head, : at.start].nonzero().flatten().tolist() for head in range(spec.heads)]]
            * sequences
            for layer in range(spec.layers)
        ]
        check(cache, held, [0, *spec.ends[:-1]], [0] * sequences)
        assert cache.held.segment is at


@pytest.mark.parametrize("kind", [Drawn, DrawnPerSequence])
@pytest.mark.parametrize("padding", [[0, 0], [3, 1], [0, 5]])
def test_rows_behind_padded_prompts(kind: type[Drawn], padding: list[int]) -> None:
    spec = shapes()
    seen = draw_seen(spec, 7, 0.6)
    cache = open_cache(kind(seen), spec)
    generate(cache, draw(spec, len(padding)), padding)
    held = [
        [
            [[p for p in range(21) if p >= missing and seen[-1, layer, head, p]] for head in range(3)]
            for missing in padding
        ]
        for layer in range(2)
    ]
    check(cache, held, [0, 6, 11, 16, 21], padding)
    check(cache, held, [0, 6, 8, 21], padding)


@pytest.mark.parametrize(
    "make",
    [
        lambda: StreamingLLM(sinks=1),
        lambda: SnapKV(window=2, queries="last", sinks=1),
        lambda: H2O(sinks=1),
        lambda: HardKV(window=2, queries=2),
        lambda: HardKV(selector="rkv", window=2, queries=2),
    ],
)
@pytest.mark.parametrize("padding", [[0, 0, 0], [2, 0, 1]])
def test_methods_of_token_models(make: Callable[[], Method], padding: list[int]) -> None:
    spec = shapes()
    method = prepared(make(), spec, 0.5)
    cache = KVCache(spec, method, dtype=torch.float32)
    held = list_held(method, cache, lambda: generate(cache, draw(spec, 3), padding), 3, padding)
    check(cache, held, [0, 6, 11, 16, 21], padding)


def list_held(
    method: Method, cache: KVCache, work: Callable[[], object], sequences: int, padding: Sequence[int]
) -> Positions:
    """What the method's last answers before the last segment come to; of a static method those of one sequence."""
    heads, asked = cache.spec.heads, listening(method)
    work()
    if method.static:  # asked once, of one sequence and of no padding
        asked = [one for one in asked if len(one.kept) == heads]
    last = {one.layer: one.ids() for one in asked if one.scale == len(cache.spec.segments) - 2}
    held = []
    for layer in range(cache.spec.layers):
        rows = last[layer] * sequences if method.static else last[layer]
        each = [rows[start : start + heads] for start in range(0, len(rows), heads)]
        held.append(
            [[[p for p in row if p >= m] for row in one] for one, m in zip(each, padding, strict=True)]
        )
    return held


@pytest.mark.parametrize("make", [lambda: StreamingLLM(sinks=1), lambda: H2O(sinks=1)])
def test_methods_of_scale_models(make: Callable[[], Method]) -> None:
    spec = small(sides=(1, 2, 3, 4, 5))
    method = prepared(make(), spec, 0.5)
    cache = KVCache(spec, method, dtype=torch.float32)
    held = list_held(method, cache, lambda: run(cache, tokens_of(spec, 2)), 2, [0, 0])
    check(cache, held, [0, *spec.ends[:-1]], [0, 0])


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
