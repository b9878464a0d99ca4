"""Bytes of a sequence as the cache measures them, against a count by hand, and budgets of them."""

from dataclasses import dataclass, replace
from fractions import Fraction

import pytest
import torch

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec, next_token
from kvbench.engine.cache import KVCache
from kvbench.engine.ledger import BudgetExceeded, add_ledgers
from kvbench.engine.memory import token_bytes
from kvbench.engine.schedule import predict_row_lengths
from kvbench.methods.first_scales import FirstScales
from kvbench.methods.full import Full
from kvbench.methods.shared.uses import Uses
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
    message = f"{kind.__name__}: {full} bytes held after layer 1 of segment 2, the budget is {full - 1};"
    with pytest.raises(BudgetExceeded, match=message):
        run(KVCache(spec, method, dtype=dtype), tokens_of(spec, 2))


@pytest.mark.parametrize("value", ["0.3", "0.5", "0.81"])
def test_at_equal_bytes_numbers_of_32_bits_leave_half_the_tokens(value: str) -> None:
    spec = small(layers=4, heads=4, sides=(1, 2, 3, 4, 5))
    found = {}
    for dtype in (torch.float16, torch.float32):
        budget = Budget.parse_bytes(value, spec, token_bytes(spec, dtype.itemsize))
        method = FirstScales()
        method.prepare(spec, budget)
        cache = KVCache(spec, method, dtype=dtype)
        run(cache, tokens_of(spec, 2))
        found[dtype], ledger = budget.capacity, cache.ledger
        assert ledger.peak_tokens == budget.tokens
        assert 0.97 * budget.bytes < ledger.sequence_bytes <= budget.bytes
        share = ledger.measure_use(spec, budget, [0]).least_share
        in_tokens = ledger.measure_use(spec, replace(budget, bytes=None), [0])
        assert share == pytest.approx(in_tokens.least_share)
    assert found[torch.float16] == 2 * found[torch.float32] == Budget.parse(value, spec).capacity


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("share", [0.2, 0.7, 1.0])
def test_what_is_needed_at_once_is_planned(dtype: torch.dtype, share: float) -> None:
    """Keys and values come in 32 bits."""
    spec = small(layers=3)
    method = prepared(Drawn(draw_seen(spec, 3, share)), spec)
    cache = KVCache(spec, method, dtype=dtype)
    run(cache, tokens_of(spec, 2))
    lengths = predict_row_lengths(spec, method)
    assert lengths is not None
    planned = count_at_once(spec, lengths, token_bytes(spec, dtype.itemsize), WHOLE)
    assert cache.ledger.rebuild_bytes + cache.ledger.transient_bytes == 2 * planned


def test_tokens_that_come_one_by_one_are_in_flight_in_all_layers() -> None:
    spec = ModelSpec("small", 3, 2, D, next_token(4, (5, 5, 6, 4)), 1)
    method = prepared(Full(), spec)
    cache = KVCache(spec, method, dtype=torch.float16)
    run(cache, tokens_of(spec, 2))
    lengths = predict_row_lengths(spec, method)
    assert lengths is not None
    planned = count_at_once(spec, lengths, HALF, WHOLE)
    assert cache.ledger.transient_bytes == 2 * 6 * 3 * 2 * HALF
    assert cache.ledger.rebuild_bytes + cache.ledger.transient_bytes == 2 * planned
