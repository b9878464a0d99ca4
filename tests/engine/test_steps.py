"""Segments whose tokens come in several steps: equal to a plain loop, whatever the steps."""

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
    with pytest.raises(ValueError, match="segment 0: received token 3 of 2"):
        cache.attend(0, *torch.zeros(3, 1, 3, 3, D))
    whole = ModelSpec("scales", 1, 3, D, tuple(s._replace(causal=False) for s in spec.segments), 1)
    scales = open_cache(Full(), whole)
    scales.reset(1)
    scales.begin(whole.segments[0])
    with pytest.raises(ValueError, match="segment 0: got 1 of 2 tokens"):
        scales.attend(0, *torch.zeros(3, 1, 3, 1, D))
