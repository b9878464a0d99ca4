"""Segments whose tokens come in several steps: equal to a plain loop, whatever the steps, and pruned once when full."""

import pytest
import torch

from kvbench.core.segments import ModelSpec
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.rkv import RKV
from kvbench.methods.shared.base import Method
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.streaming_llm import StreamingLLM
from tests.support.engine import D, open_cache
from tests.support.steps import agree, draw, generate, shapes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_in_flight_are_counted_apart_and_the_ledger_does_not_grow(dtype: torch.dtype) -> None:
    spec = shapes(4, [6, 6])
    cache = open_cache(Full(), spec, dtype=dtype)
    generate(cache, draw(spec, 3), size=1, split=True)
    per_token = 2 * D * dtype.itemsize * 3
    assert cache.ledger.tokens_after == [[12, 24], [42, 60], [60, 60]]
    assert cache.ledger.peak_bytes == 60 * per_token
    assert cache.ledger.transient_bytes == 2 * 3 * 6 * per_token  # a row of both layers
    assert cache.ledger.state_bytes == 0


@pytest.mark.parametrize(
    "method", [StreamingLLM(sinks=1), H2O(), SnapKV(window=2, queries="last"), RKV(window=2, queries="last")]
)
@pytest.mark.parametrize("size", [1, 3])
def test_methods_hold_their_budget_after_every_segment_whatever_the_steps(method: Method, size: int) -> None:
    spec = shapes(3, [5] * 6)
    cache = open_cache(method, spec, "0.4")
    inputs = draw(spec, 2)
    found = generate(cache, inputs, size=size, split=True)
    at_once = generate(cache, inputs, size=100, split=True)
    agree(found, at_once)
    assert cache.ledger.peak_tokens <= float(method.budget.capacity)
    assert cache.ledger.tokens_after[-1][-1] > 0.9 * float(method.budget.capacity)


def test_too_many_tokens_and_parts_of_a_scale_are_refused() -> None:
    spec = shapes(2, [3])
    cache = open_cache(Full(), spec)
    cache.reset(1)
    cache.begin(spec.segments[0])
    with pytest.raises(ValueError, match="segment 0: token 3 came, it has 2 tokens"):
        cache.attend(0, *torch.zeros(3, 1, 3, 3, D))
    whole = ModelSpec("scales", 1, 3, D, tuple(s._replace(causal=False) for s in spec.segments), 1)
    scales = open_cache(Full(), whole)
    scales.reset(1)
    scales.begin(whole.segments[0])
    with pytest.raises(ValueError, match="segment 0: 1 tokens came of 2"):
        scales.attend(0, *torch.zeros(3, 1, 3, 1, D))
