"""What every method owes the cache, for each of them, and a new method written from the contract alone."""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvbench.attention_by_scale import AttentionByScale
from kvbench.budget import Budget, InfeasibleBudget
from kvbench.cache import KVCache
from kvbench.methods.base import Artifact, Method, View
from kvbench.methods.full import Full
from kvbench.methods.heatkv import BinaryHeatKV, HeatKV
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.segments import ModelSpec, next_scale

D, SINKS = 8, 2
SPEC = ModelSpec("small", 4, 3, D, next_scale([(side, side) for side in (1, 2, 3, 4, 5, 6)]))
BUDGETS = ("0.1", "0.25", "0.5", "0.9", 1)


@dataclass
class HeaviestPerHead(Method):
    """The sinks, then the most attended slots of every row: a method of a user's own."""

    sinks: int

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """The sinks must fit."""
        needed = spec.ends[self.sinks - 1]
        if budget.per_head < needed:
            raise InfeasibleBudget.of_sinks(budget, self.sinks, needed, spec)

    def keep(self, view: View) -> Tensor | None:
        """Top slots by attention."""
        if self.budget.fraction == 1:
            return None
        room = min(self.budget.tokens // self.spec.all_heads, view.position.shape[1])
        score = view.mass() + 2.0 * (view.segment < self.sinks)
        score = score.masked_fill(view.position < 0, -1)
        kept = torch.zeros_like(view.position, dtype=torch.bool)
        return kept.scatter(1, score.topk(room, sorted=False).indices, True)


METHODS: dict[str, Callable[[], Method]] = {
    "full": Full,
    "streaming_llm": lambda: StreamingLLM(SINKS),
    "heatkv": lambda: HeatKV(SINKS),
    "binary_heatkv": lambda: BinaryHeatKV(SINKS),
    "naive_heatkv": lambda: HeatKV(SINKS, naive=True),
    "own": lambda: HeaviestPerHead(SINKS),
}
COMPRESSING = [name for name in METHODS if name != "full"]


def artifact(seed: int = 0) -> Artifact:
    scales = len(SPEC.segments)
    shape = (SPEC.layers, SPEC.heads, scales, scales)
    mass = torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return Artifact(AttentionByScale.kind, {"mass": mass})


def cache_of(name: str, budget: float | str, seed: int = 0) -> KVCache:
    method = METHODS[name]()
    method.prepare(
        SPEC,
        Budget.parse(budget, SPEC),
        artifact(seed) if isinstance(method.needs(), AttentionByScale) else None,
    )
    return KVCache(SPEC, method, dtype=torch.float32)


class Inputs(NamedTuple):
    """q, k, v stacked, per segment [3, layers, sequences, heads, tokens, D]."""

    segments: list[Tensor]

    def rows(self, chosen: list[int]) -> "Inputs":
        return Inputs([qkv[:, :, chosen] for qkv in self.segments])


def inputs(sequences: int, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    shape = (3, SPEC.layers, sequences, SPEC.heads)
    return Inputs([torch.randn(*shape, s.length, D, generator=generator) for s in SPEC.segments])


def run(cache: KVCache, given: Inputs) -> list[Tensor]:
    cache.reset(given.segments[0].shape[2])
    out = []
    for segment, (q, k, v) in zip(SPEC.segments, given.segments, strict=True):
        cache.begin(segment)
        out += [cache.attend(layer, q[layer], k[layer], v[layer]) for layer in range(SPEC.layers)]
    return out


def equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", COMPRESSING)
def test_the_whole_budget_is_bit_equal_to_full(name: str) -> None:
    given = inputs(4)
    cache = cache_of(name, 1)
    found, expected = run(cache, given), run(cache_of("full", 1), given)
    if cache.method.static:
        assert equal(found, expected)
    for one, other in zip(found, expected, strict=True):  # rows lie otherwise in memory if sequences differ
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", COMPRESSING)
@pytest.mark.parametrize("budget", BUDGETS)
def test_the_budget_holds_at_every_segment_and_layer(name: str, budget: float | str) -> None:
    cache = cache_of(name, budget)
    run(cache, inputs(4))
    capacity = cache.method.budget.capacity
    assert all(tokens <= capacity for row in cache.ledger.tokens_after for tokens in row)
    if cache.method.static:  # every sequence is alike, so the tokens counted are the bytes held
        assert cache.ledger.peak_bytes == cache.ledger.peak_tokens * 2 * D * 4 * 4
    assert cache.ledger.peak_bytes <= float(capacity) * 2 * D * 4 * 4


@given(
    st.sampled_from(COMPRESSING), st.fractions(Fraction(1, 10), 1, max_denominator=500), st.integers(0, 10**6)
)
@settings(max_examples=60, deadline=None)
def test_any_budget_holds(name: str, share: Fraction, seed: int) -> None:
    cache = cache_of(name, str(share), seed)
    run(cache, inputs(2, seed))
    assert cache.ledger.peak_tokens <= cache.method.budget.capacity


@pytest.mark.parametrize("name", list(METHODS))
def test_two_generations_are_equal(name: str) -> None:
    cache = cache_of(name, "0.25" if name != "full" else 1)
    first = run(cache, inputs(4))
    run(cache, inputs(2, seed=5))
    assert equal(run(cache, inputs(4)), first)
    assert equal(run(cache_of(name, "0.25" if name != "full" else 1), inputs(4)), first)


@pytest.mark.parametrize("name", list(METHODS))
def test_a_batch_of_two_equals_two_batches_of_one(name: str) -> None:
    budget = "0.25" if name != "full" else 1
    given = inputs(4)  # two prompts: conditional rows 0 and 1, unconditional rows 2 and 3
    together = run(cache_of(name, budget), given)
    for prompt in range(2):
        rows = [prompt, prompt + 2]
        alone = run(cache_of(name, budget), given.rows(rows))
        for both, one in zip(together, alone, strict=True):
            torch.testing.assert_close(both[rows], one, atol=1e-6, rtol=1e-5)


class Asked(NamedTuple):
    """One answer of a method."""

    scale: int
    position: Tensor
    kept: Tensor


def answers(name: str, budget: float | str) -> list[Asked]:
    cache = cache_of(name, budget)
    method, seen = cache.method, []
    inner = method.keep

    def keep(view: View) -> Tensor | None:
        kept = inner(view)
        everything = torch.ones_like(view.position, dtype=torch.bool)
        seen.append(
            Asked(view.at.index, view.position, (everything if kept is None else kept) & (view.position >= 0))
        )
        return kept

    method.keep = keep
    run(cache, inputs(2))
    return seen


@pytest.mark.parametrize("name", COMPRESSING)
def test_sinks_are_always_kept(name: str) -> None:
    seen = answers(name, "0.1")
    assert {asked.scale for asked in seen} == set(range(len(SPEC.segments) - 1))
    for index, position, kept in seen:
        sinks = (position >= 0) & (position < SPEC.ends[min(SINKS - 1, index)])
        assert (sinks.sum(1) == min(SPEC.ends[SINKS - 1], SPEC.ends[index])).all()
        assert kept[sinks].all()


@pytest.mark.parametrize("budget", ["0.1", "0.5", "20"])
def test_streaming_llm_keeps_exactly_sinks_and_recent(budget: str) -> None:
    room = Budget.parse(budget, SPEC).tokens // SPEC.all_heads
    for index, position, kept in answers("streaming_llm", budget):
        end, sinks = SPEC.ends[index], SPEC.ends[SINKS - 1]
        expected = [p for p in range(end) if p < sinks or p >= end - (room - sinks)]
        assert len(expected) == min(room, end)
        for row in range(len(position)):
            assert position[row][kept[row]].tolist() == expected


@pytest.mark.parametrize("name", ["heatkv", "naive_heatkv", "binary_heatkv"])
def test_heatkv_keeps_what_its_schedule_says(name: str) -> None:
    cache = cache_of(name, "0.25")
    run(cache, inputs(2))
    schedule = cache.method.schedule
    # The cache moves on to the next scale's state as soon as a layer ran, so only whole scales compare.
    held = torch.tensor(cache.ledger.tokens_after)
    assert (held <= torch.from_numpy(schedule.cached_after)).all()
    lengths = torch.tensor(SPEC.lengths)
    for k in range(1, len(SPEC.segments)):
        present = ~torch.from_numpy(schedule.absent[k, :k])
        assert held[k - 1, -1] == (present.sum((1, 2)) * lengths[:k]).sum()
    assert schedule.absent.any()


@pytest.mark.parametrize("name", COMPRESSING)
def test_a_budget_below_the_sinks_is_infeasible(name: str) -> None:
    with pytest.raises(InfeasibleBudget, match="the smallest feasible budget"):
        cache_of(name, "0.05")


@pytest.mark.parametrize("method", [HeatKV, BinaryHeatKV])
def test_heatkv_without_order_says_what_to_do(method: type[HeatKV]) -> None:
    with pytest.raises(ValueError, match=r"method.orders: .*task=calibrate"):
        method(SINKS).prepare(SPEC, Budget.parse("0.5", SPEC))


@pytest.mark.parametrize("sinks", [-1, 6])
@pytest.mark.parametrize("method", [HeatKV, BinaryHeatKV, StreamingLLM])
def test_sinks_out_of_range_are_refused(method: Callable[[int], Method], sinks: int) -> None:
    with pytest.raises(ValueError, match=f"sinks={sinks}"):
        method(sinks).check(SPEC, Budget.parse("0.5", SPEC))


def test_a_method_without_keep_is_refused() -> None:
    @dataclass
    class Nothing(Method):
        static: ClassVar[bool] = True

    method = Nothing()
    method.prepare(SPEC, Budget.parse(1, SPEC))
    with pytest.raises(NotImplementedError):
        run(KVCache(SPEC, method, dtype=torch.float32), inputs(2))
