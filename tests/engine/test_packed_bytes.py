"""Bytes in few bits, foreseen and measured, and budgets of them."""

import pytest
import torch

from kvbench.core.budget import Budget, InfeasibleBudget
from kvbench.core.segments import ModelSpec, next_token
from kvbench.core.storage import StorageConfig
from kvbench.engine.cache import KVCache
from kvbench.engine.coding.formats import Packing
from kvbench.engine.packed.bytes import bound_token_bytes, find_sure_capacity, fit_budget
from kvbench.methods.adakv import AdaKV
from kvbench.methods.heatkv.method import HeatKV
from kvbench.methods.heatkv.scores import AttentionByScale
from kvbench.methods.pyramidkv import PyramidKV
from kvbench.methods.shared.base import Method
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.streaming_llm import StreamingLLM
from tests.support.engine import D, run, small, tokens_of

SCALES = small(layers=3, heads=4, sides=(1, 2, 3, 4, 5))
STEPS = ModelSpec("steps", 2, 2, D, next_token(5, [4, 4, 4, 4]))
PACKINGS = {
    "channel": Packing(4, StorageConfig()),
    "token": Packing(4, StorageConfig("token")),
    "kivi": Packing(2, StorageConfig(group=3, residual=6)),
    "fp8": Packing(8, StorageConfig(), fp8=True),
    "rotated": Packing(4, StorageConfig("rotated", "rotated", before_rotation=False, value_bits=2)),
    "exempt": Packing(4, StorageConfig("token", exempt=1)),
}
HALF = 2 * D * 2


def open_packed(spec: ModelSpec, method: Method, packing: Packing) -> KVCache:
    return KVCache(spec, method, dtype=torch.float32, packing=packing)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("channel", (12, 32)), ("token", (16, 16)), ("kivi", (8, 32)), ("fp8", (16, 16)),
        ("rotated", (10, 32)), ("exempt", (16, 32)),
    ],
)  # fmt: skip
def test_bounds_of_a_token(name: str, sizes: tuple[int, int]) -> None:
    """Of 8 channels: 8 bytes in 4 bits, 4 for each scale and zero of a token, 2 for a gain; 32 bytes in 16 bits."""
    assert bound_token_bytes(SCALES, PACKINGS[name]) == sizes


@pytest.mark.parametrize("name", PACKINGS)
@pytest.mark.parametrize("value", ["0.08", "0.25"])
def test_static_methods_get_the_tokens_that_fit(name: str, value: str) -> None:
    artifact = AttentionByScale().make_stand_in(SCALES)
    packing = PACKINGS[name]
    budget = Budget.parse_bytes(value, SCALES, bound_token_bytes(SCALES, packing)[1])
    assert budget.bytes is not None
    for method in (StreamingLLM(sinks=1), HeatKV(sinks=1)):
        method.prepare(SCALES, fit_budget(method, SCALES, budget, artifact, packing), artifact)
        given = method.budget
        assert given.bytes == budget.bytes
        assert given.capacity >= budget.capacity
        cache = open_packed(SCALES, method, packing)
        run(cache, tokens_of(SCALES, 2))
        assert 0.75 * budget.bytes < cache.ledger.sequence_bytes <= budget.bytes
        assert 0 < cache.ledger.measure_use(SCALES, given, [0]).least_share <= 1
        if (name, value) == ("channel", "0.25"):  # of some others all tokens have one size, or most are young
            assert given.tokens > 1.5 * budget.tokens


def test_methods_that_look_at_data_get_what_is_sure_to_fit() -> None:
    for name, times in (("token", 2), ("channel", 1)):
        packing = PACKINGS[name]
        budget = Budget.parse_bytes("0.25", SCALES, bound_token_bytes(SCALES, packing)[1])
        assert budget.capacity == times * Budget.parse("0.25", SCALES).capacity
        method = SnapKV(sinks=1)
        method.prepare(SCALES, fit_budget(method, SCALES, budget, None, packing), None)
        assert method.budget == budget
        cache = open_packed(SCALES, method, packing)
        run(cache, tokens_of(SCALES, 2))
        assert cache.ledger.sequence_bytes <= (budget.bytes or 0)


@pytest.mark.parametrize("method", [SnapKV(sinks=1), PyramidKV(sinks=1), AdaKV(sinks=1)], ids=repr)
def test_exempt_layers_leave_the_others_more_tokens(method: Method) -> None:
    """One of three layers has tokens of 16 bytes, two have 32: what all layers share has 80 / 3 each."""
    spec, packing = SCALES, PACKINGS["exempt"]
    budget = find_sure_capacity(Budget.parse_bytes("0.25", spec, 1), spec, packing)
    assert budget.capacity == Budget.parse("0.25", spec).capacity  # all tokens could be in exempt layers
    method.prepare(spec, fit_budget(method, spec, budget, None, packing), None)
    if method.capacity(0, spec.segments[1]) is None:
        assert method.budget.capacity == budget.capacity
    else:
        assert method.budget.capacity > budget.capacity
    cache = open_packed(spec, method, packing)
    run(cache, tokens_of(spec, 2))
    assert cache.ledger.sequence_bytes <= (budget.bytes or 0)
    if isinstance(method, SnapKV):
        assert method.budget.tokens == (budget.bytes or 0) * 3 // 80
        assert cache.ledger.sequence_bytes > 0.97 * (budget.bytes or 0)


def test_sinks_that_do_not_fit_even_in_few_bits_are_refused() -> None:
    method, packing = StreamingLLM(sinks=1), PACKINGS["token"]
    budget = Budget.parse_bytes("0.01", SCALES, bound_token_bytes(SCALES, packing)[1])
    with pytest.raises(InfeasibleBudget, match=r"budget=0\.01 budget_unit=bytes: 1 sink scales need 1 of 30"):
        method.prepare(SCALES, fit_budget(method, SCALES, budget, None, packing), None)
