"""The KV cache: equal to masked dense attention, exact in bytes, strict about its budget."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvbench.engine import schedule
from kvbench.engine.cache import KVCache
from kvbench.engine.ledger import BudgetExceeded
from kvbench.methods.full import Full
from kvbench.methods.shared.uses import Uses
from kvbench.methods.shared.view import View
from kvbench.methods.snapkv import SnapKV
from tests.support.engine import (
    D,
    Drawn,
    DrawnPerSequence,
    close,
    dense,
    draw_seen,
    open_cache,
    prepared,
    run,
    small,
    tokens_of,
)
from tests.support.steps import draw, generate, shapes


@pytest.mark.parametrize("kind", [Drawn, DrawnPerSequence])
@given(
    seed=st.integers(0, 10**6),
    share=st.sampled_from((0.0, 0.2, 0.6, 0.95, 1.0)),
    sequences=st.sampled_from((1, 2, 4)),
    groups=st.integers(1, 2),
    sides=st.lists(st.integers(1, 4), min_size=1, max_size=5),
)
@settings(max_examples=40, deadline=None)
def test_ragged_rows_equal_masked_attention(
    kind: type[Drawn], seed: int, share: float, sequences: int, groups: int, sides: list[int]
) -> None:
    spec = small(sides=tuple(sides), scale=0.5)
    seen = draw_seen(spec, seed, share)
    cache = open_cache(kind(seen), spec)
    inputs = tokens_of(spec, sequences, seed, groups)
    expected = dense(spec, inputs, seen)
    for _ in range(2):
        close(run(cache, inputs), expected)
    for segment in spec.segments[:-1]:
        following = spec.segments[segment.index + 1]
        held = [int(seen[following.index, layer, :, : following.start].sum()) for layer in range(spec.layers)]
        assert cache.ledger.tokens_after[segment.index][-1] == sum(held)


def test_bytes_are_exact() -> None:
    spec, dtype, sequences = small(), torch.bfloat16, 4
    per_token = 2 * D * dtype.itemsize * sequences
    cache = open_cache(Full(), spec, dtype=dtype)
    run(cache, tokens_of(spec, sequences))
    ledger = cache.ledger
    assert ledger.peak_tokens == spec.full_tokens == 2 * 3 * 14
    assert ledger.peak_bytes == ledger.peak_tokens * per_token
    assert ledger.tokens_after[0] == [3, 6]
    assert ledger.tokens_after[1] == [3 * (5 + 1), 3 * (5 + 5)]
    assert ledger.tokens_after[-1] == [84, 84]
    assert ledger.transient_bytes == 3 * 16 * 2 * D * 4 * sequences
    # Layer 1 going from 15 to 42 tokens beside layer 0's 42: its values exist twice, its keys are new already.
    assert ledger.rebuild_bytes == (42 + 42 + 15 / 2) * per_token
    assert sum(store.bytes for store in cache._stores) == 0  # the last segment is not stored


@pytest.mark.parametrize("kind", [Drawn, DrawnPerSequence])
def test_a_ledger_is_of_one_generation_and_what_is_released_is_made_again(kind: type[Drawn]) -> None:
    spec = small()
    kept = draw_seen(spec, 3, 0.5)
    again = open_cache(kind(kept), spec)
    for sequences in (3, 1, 2):
        inputs = tokens_of(spec, sequences, sequences)
        fresh = open_cache(kind(kept), spec)
        for out, expected in zip(run(again, inputs), run(fresh, inputs), strict=True):
            torch.testing.assert_close(out, expected, atol=0, rtol=0)
        layouts = again.held.layouts
        again.release()
        assert again._storage.arena.size == 0
        assert (again.ledger, again.held.layouts) == (fresh.ledger, layouts)


def test_exceeding_the_budget_names_layer_and_segment() -> None:
    spec = small()
    cache = open_cache(Full(), spec, "0.5")
    with pytest.raises(
        BudgetExceeded, match=r"method=Full: 57 tokens held after layer 0 of segment 2, .* is 42"
    ):
        run(cache, tokens_of(spec, 2))
    method = prepared(Full(), spec, "0.5")
    method.strict = False
    lenient = KVCache(spec, method, dtype=torch.float32)
    close(run(lenient, tokens_of(spec, 2)), dense(spec, tokens_of(spec, 2)))
    assert lenient.ledger.peak_tokens == spec.full_tokens


def test_reset_recovers_from_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, errors = small(), [RuntimeError("out of memory")]
    seen, keep = draw_seen(spec, 3, 0.5), DrawnPerSequence.keep

    def fail_once(method: DrawnPerSequence, view: View) -> Tensor:
        if errors and view.segment.index == 2 and view.layer == 1:
            raise errors.pop()
        return keep(method, view)

    monkeypatch.setattr(DrawnPerSequence, "keep", fail_once)
    cache, inputs = open_cache(DrawnPerSequence(seen), spec), tokens_of(spec, 2)
    with pytest.raises(RuntimeError, match="out of memory"):
        run(cache, inputs)
    close(run(cache, inputs), dense(spec, inputs, seen))
    other = tokens_of(spec, 6, seed=1)
    close(run(cache, other), dense(spec, other, seen))


@dataclass
class Together(DrawnPerSequence):
    """A method that sees all layers first; it notes what it is asked."""

    uses = Uses(joint=True)

    def __post_init__(self) -> None:
        self.asked: list[str] = []

    def compare_layers(self, views: Sequence[View]) -> None:
        self.asked += [f"compare {view.layer}" for view in views]

    def keep(self, view: View) -> Tensor:
        self.asked.append(f"keep {view.layer}")
        return super().keep(view)


def test_a_method_that_decides_jointly_sees_all_layers_before_any_is_cut() -> None:
    spec = shapes(4, [3, 3, 2], heads=2)
    seen = draw_seen(spec, 3, 0.6)
    method, alone = Together(seen), DrawnPerSequence(seen)
    caches = [open_cache(each, spec) for each in (method, alone)]
    inputs = draw(spec, 2)
    together, apart = (generate(cache, inputs) for cache in caches)
    assert all(torch.equal(one, other) for one, other in zip(together, apart, strict=True))
    queries = 2 * 2 * 4 * D * 4  # of a layer's prompt, 2 sequences of 2 heads; those of both layers wait
    assert caches[0].ledger == replace(caches[1].ledger, state_bytes=2 * queries)
    assert method.asked == ["compare 0", "compare 1", "keep 0", "keep 1"] * (len(spec.segments) - 1)


def test_a_segment_that_drops_nothing_asks_for_no_scores_and_one_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Layers that keep all of the same slots share the table."""
    spec, asked = small(), list[str]()
    for owner, name in ((schedule, "source_table"), (SnapKV, "score")):
        usual = getattr(owner, name)

        def count(*given: object, name: str = name, usual: Callable[..., object] = usual) -> object:
            asked.append(name)
            return usual(*given)

        monkeypatch.setattr(owner, name, count)
    cache = open_cache(SnapKV(window=1), spec, 6)  # holds the 5 tokens of two scales, and not the 14 of three
    run(cache, tokens_of(spec, 2))
    assert asked == ["source_table"] * 2 + ["score", "source_table"] * spec.layers
    assert cache.ledger.tokens_after[:2] == [[3, 6], [3 * (5 + 1), 3 * (5 + 5)]]
