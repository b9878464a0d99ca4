"""Budgets in bytes: what a cache holds and plans, against a count by hand, and tokens that fit in few bits."""

from dataclasses import dataclass, replace
from fractions import Fraction

import pytest
import torch

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec, next_token
from kvbench.core.storage import StorageConfig
from kvbench.engine.cache import KVCache
from kvbench.engine.coding.formats import Packing
from kvbench.engine.ledger import BudgetExceeded, add_ledgers
from kvbench.engine.memory import token_bytes
from kvbench.engine.packed.bytes import bound_token_bytes, find_sure_capacity, fit_budget
from kvbench.engine.schedule import predict_row_lengths
from kvbench.methods.adakv import AdaKV
from kvbench.methods.first_scales import FirstScales
from kvbench.methods.heatkv.method import HeatKV
from kvbench.methods.heatkv.scores import AttentionByScale
from kvbench.methods.pyramidkv import PyramidKV
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.uses import Uses
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.plan import count_at_once
from tests.support.engine import D, Drawn, DrawnPerSequence, draw_seen, prepared, run, small, tokens_of

HALF, WHOLE = 2 * D * 2, 2 * D * 4
"""Bytes of a key and a value in 16 and in 32 bits."""


@dataclass
class Biased(DrawnPerSequence):
    """Slots have a bias, which makes keys and values 8 channels wider."""

    uses = Uses(replaces=True, bias=True)


@pytest.mark.parametrize(
    ("kind", "dtype", "size"),
    [
        (Drawn, torch.float32, WHOLE),
        (Drawn, torch.float16, HALF),
        (DrawnPerSequence, torch.float32, WHOLE),
        (DrawnPerSequence, torch.bfloat16, HALF),
        (Biased, torch.float32, 2 * (D + 8) * 4),
    ],
)
def test_bytes_after_every_layer(kind: type[Drawn], dtype: torch.dtype, size: int) -> None:
    """Layers up to l hold what the next segment sees, later ones what this one saw."""
    spec = small(layers=3)
    seen = draw_seen(spec, 5, 0.6)
    method = prepared(kind(seen), spec)
    assert token_bytes(spec, dtype.itemsize, biased=method.uses.bias) == size
    cache = KVCache(spec, method, dtype=dtype)
    run(cache, tokens_of(spec, 4))
    for at in spec.segments:
        for layer in range(spec.layers):
            tokens = seen[at.index, layer + 1 :, :, : at.start].sum()
            if not at.last:
                tokens = tokens + seen[at.index + 1, : layer + 1, :, : at.end].sum()
            else:
                tokens = tokens + seen[at.index, : layer + 1, :, : at.start].sum()
            held = cache.ledger.held_bytes[at.index][layer]
            assert len(held) == (1 if kind is Drawn else 4)
            assert set(held) == {int(tokens) * size}
    ledger = cache.ledger
    assert ledger.sequence_bytes == ledger.peak_tokens * size
    assert ledger.last_bytes == ledger.last_tokens * size
    assert ledger.peak_bytes == 4 * ledger.sequence_bytes
    assert add_ledgers([ledger, ledger]).sequence_bytes == 2 * ledger.sequence_bytes


@pytest.mark.parametrize("kind", [Drawn, DrawnPerSequence])
@pytest.mark.parametrize(("dtype", "size"), [(torch.float16, HALF), (torch.float32, WHOLE)])
def test_a_byte_less_than_held_is_an_error(kind: type[Drawn], dtype: torch.dtype, size: int) -> None:
    spec = small()
    method = kind(draw_seen(spec, 0, 1.0))
    full = spec.full_tokens * size
    just = replace(Budget.parse(1, spec), bytes=Fraction(full), full_bytes=spec.full_bytes)
    method.prepare(spec, just)
    run(KVCache(spec, method, dtype=dtype), tokens_of(spec, 2))
    method.prepare(spec, replace(just, bytes=Fraction(full - 1)))
    message = (
        f"method={kind.__name__}: {full} bytes held after layer 1 of segment 2, the budget is {full - 1};"
    )
    with pytest.raises(BudgetExceeded, match=message):
        run(KVCache(spec, method, dtype=dtype), tokens_of(spec, 2))


def test_the_share_of_a_budget_in_bytes_that_is_used_is_that_of_its_tokens() -> None:
    spec, method = small(layers=4, heads=4, sides=(1, 2, 3, 4, 5)), FirstScales()
    budget = Budget.parse_bytes("0.3", spec, WHOLE)
    method.prepare(spec, budget)
    cache = KVCache(spec, method, dtype=torch.float32)
    run(cache, tokens_of(spec, 2))
    assert 0.97 * budget.bytes < cache.ledger.sequence_bytes <= budget.bytes
    more = Budget.parse_bytes("0.45", spec, WHOLE)
    shares = [
        cache.ledger.measure_use(spec, one, [0]).least_share for one in (more, replace(more, bytes=None))
    ]
    assert shares[0] == pytest.approx(shares[1]) == pytest.approx(2 / 3, rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("share", [0.2, 1.0])
@pytest.mark.parametrize(
    "spec", [small(layers=3), ModelSpec("steps", 3, 2, D, next_token(4, (5, 5, 6, 4)), 1)]
)
def test_what_is_needed_at_once_is_planned(spec: ModelSpec, dtype: torch.dtype, share: float) -> None:
    """Keys and values come in 32 bits; tokens that come one by one are in flight in all layers."""
    method = prepared(Drawn(draw_seen(spec, 3, share)), spec)
    cache = KVCache(spec, method, dtype=dtype)
    run(cache, tokens_of(spec, 2))
    lengths = predict_row_lengths(spec, method)
    assert lengths is not None
    planned = count_at_once(spec, lengths, token_bytes(spec, dtype.itemsize), WHOLE)
    assert cache.ledger.rebuild_bytes + cache.ledger.transient_bytes == 2 * planned


SCALES = small(layers=3, heads=4, sides=(1, 2, 3, 4, 5))
PACKINGS = {
    "channel": Packing(4, StorageConfig()),
    "token": Packing(4, StorageConfig("token")),
    "kivi": Packing(2, StorageConfig(group=3, residual=6)),
    "fp8": Packing(8, StorageConfig(), fp8=True),
    "rotated": Packing(4, StorageConfig("rotated", "rotated", before_rotation=False, value_bits=2)),
    "exempt": Packing(4, StorageConfig("token", exempt=1)),
}


def open_packed(spec: ModelSpec, method: Method, packing: Packing) -> KVCache:
    return KVCache(spec, method, dtype=torch.float32, packing=packing)


def test_bounds_of_a_token() -> None:
    """Of 8 channels: 8 bytes in 4 bits, 4 for each scale and zero of a token, 2 for a gain; 32 bytes in 16 bits."""
    bounds = {"channel": (12, 32), "token": (16, 16), "kivi": (8, 32), "fp8": (16, 16), "rotated": (10, 32)}
    found = {name: bound_token_bytes(SCALES, packing) for name, packing in PACKINGS.items()}
    assert found == {**bounds, "exempt": (16, 32)}


@pytest.mark.parametrize("name", PACKINGS)
@pytest.mark.parametrize("value", ["0.08", "0.25"])
def test_static_methods_get_the_tokens_that_fit(name: str, value: str) -> None:
    artifact = AttentionByScale().make_random_artifact(SCALES)
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
