"""The ring of storage: blocks never overlap, and the size foreseen is enough."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvbench.core.segments import ModelSpec, next_token
from kvbench.engine.arena import Arena, ring_slots
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.headkv import HeadKV
from kvbench.methods.shared.base import Method
from kvbench.methods.streaming_llm import StreamingLLM
from tests.support.engine import D, DrawnPerSequence, draw_seen, open_cache, run, small, tokens_of

CPU = torch.device("cpu")
BLOCKS = st.integers(1, 4).flatmap(
    lambda layers: st.lists(
        st.lists(st.integers(0, 9), min_size=layers, max_size=layers), min_size=1, max_size=8
    )
)
"""Slots of each layer after each segment."""


@given(blocks=BLOCKS, both=st.booleans())
@settings(max_examples=200, deadline=None)
def test_layers_rebuilt_in_turn_fit_the_ring_and_never_overlap(blocks: list[list[int]], both: bool) -> None:
    arena = Arena(ring_slots(blocks), torch.float32, CPU)
    inside = range(arena.buffer.data_ptr(), arena.buffer.data_ptr() + arena.buffer.nbytes + 1)
    held: list[list[tuple[Tensor, int | None]]] = [[] for _ in blocks[0]]
    marks: dict[int, Tensor] = {}
    for layers in blocks:
        for layer, slots in enumerate(layers):
            # At once, if there is room: what was held is released after both were taken.
            late = []
            together = both and arena.fits(2 * slots)
            for which in (0, 1):
                tensor, handle = arena.take((slots,))
                assert tensor.data_ptr() in inside or not slots
                tensor.fill_(len(marks))
                marks[len(marks)] = tensor
                if len(held[layer]) > which:
                    late.append(held[layer][which][1])
                    if not together:
                        arena.release(late.pop())
                    held[layer][which] = (tensor, handle)
                else:
                    held[layer].append((tensor, handle))
            for handle in late:
                arena.release(handle)
            for other, parts in enumerate(held):
                for tensor, _ in parts:
                    assert len(set(tensor.tolist())) <= 1, other  # nobody wrote into what is alive


def test_what_does_not_fit_has_storage_of_its_own() -> None:
    arena = Arena(8, torch.float32, CPU)
    first, handle = arena.take((5,))
    second, none = arena.take((4,))
    assert none is None
    assert second.data_ptr() != first.data_ptr() + first.nbytes
    arena.release(none)
    arena.release(handle)
    assert arena.take((8,))[0].data_ptr() == first.data_ptr()
    arena.clear()
    (begin, oldest), _ = arena.take((5,)), arena.take((3,))
    arena.release(oldest)
    assert begin.data_ptr() == arena.take((2,))[0].data_ptr() == first.data_ptr()
    assert [arena.take((count,))[1] is None for count in (4, 3)] == [True, False]  # before the oldest block


@pytest.mark.parametrize(
    "method", [Full(), StreamingLLM(sinks=1), H2O()], ids=lambda method: type(method).__name__
)
@pytest.mark.parametrize("steps", [False, True])
def test_the_ring_is_allocated_once(method: Method, steps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = small(layers=3)
    if steps:
        spec = ModelSpec("steps", 3, 3, D, next_token(3, [4] * 5), 1)
    cache = open_cache(method, spec, 1 if isinstance(method, Full) else "0.5")
    run(cache, tokens_of(spec, 4))
    arena = cache._storage.arena
    take, taken = Arena.take, list[tuple[Tensor, int | None]]()
    monkeypatch.setattr(Arena, "take", lambda *given: taken.append(take(*given)) or taken[-1])
    for sequences in (4, 2):
        run(cache, tokens_of(spec, sequences))
    assert taken
    assert not [handle for tensor, handle in taken if handle is None and tensor.numel()]
    assert cache._storage.arena is arena
    assert arena.size <= 1.6 * spec.full_tokens * 2 * 4 * D  # tiny layers: one of three is rebuilt at a time


def test_the_budget_bounds_lengths() -> None:
    steps = ModelSpec("steps", 3, 2, D, next_token(3, [4] * 5), 1)
    for method, spec, budget, slots in (
        (DrawnPerSequence(draw_seen(small(), 1, 0.5)), small(), 1, 93),  # 84 tokens, and a tenth
        (HeadKV(sinks=1), steps, "0.5", 63 + 3 * 2 * 4),  # 57 tokens and a tenth, and a row in every head
    ):
        cache = open_cache(method, spec, budget)
        cache.reset(2)
        assert cache._storage.arena.size == 2 * slots * 2 * D


@given(BLOCKS)
def test_a_ring_is_at_most_the_budget_and_the_largest_layer(tokens: list[list[int]]) -> None:
    """As docs/budget.md says. B is the most that all layers hold after any of them was rebuilt."""
    held, budget = [0] * len(tokens[0]), 0
    for layers in tokens:
        for layer, count in enumerate(layers):
            held[layer] = count
            budget = max(budget, sum(held))
    assert ring_slots(tokens) <= 2 * (budget + max(map(max, tokens)))  # keys and values
