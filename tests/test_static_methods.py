"""Methods that look at positions alone: sinks stay, windows are exact, HeatKV does what its schedule says."""

from collections.abc import Callable

import pytest
import torch

from kvbench.attention_by_scale import AttentionByScale
from kvbench.budget import Budget
from kvbench.cache import KVCache
from kvbench.methods.base import Artifact, Method
from kvbench.methods.heatkv import BinaryHeatKV, HeatKV
from kvbench.methods.scale_groups import ScaleGroups
from kvbench.methods.streaming_llm import StreamingLLM
from tests.engine import Asked, listening, prepared, run, small, tokens_of

SINKS = 2
SPEC = small(layers=4, sides=(1, 2, 3, 4, 5, 6))
METHODS: dict[str, Callable[[], Method]] = {
    "streaming_llm": lambda: StreamingLLM(SINKS),
    "heatkv": lambda: HeatKV(SINKS),
    "binary_heatkv": lambda: BinaryHeatKV(SINKS),
    "naive_heatkv": lambda: HeatKV(SINKS, naive=True),
}


def cache_of(name: str, budget: float | str) -> KVCache:
    generator = torch.Generator().manual_seed(0)
    mass = torch.rand(SPEC.layers, SPEC.heads, 6, 6, generator=generator, dtype=torch.float64)
    artifact = Artifact(AttentionByScale.kind, {"mass": mass})
    return KVCache(SPEC, prepared(METHODS[name](), SPEC, budget, artifact), dtype=torch.float32)


def answers(name: str, budget: float | str) -> list[Asked]:
    cache = cache_of(name, budget)
    seen = listening(cache.method)
    run(cache, SPEC, tokens_of(SPEC, 2))
    return seen


@pytest.mark.parametrize("name", METHODS)
def test_sinks_are_always_kept(name: str) -> None:
    seen = answers(name, "0.1")
    assert {asked.scale for asked in seen} == set(range(len(SPEC.segments) - 1))
    for _, index, position, kept in seen:
        sinks = (position >= 0) & (position < SPEC.ends[min(SINKS - 1, index)])
        assert (sinks.sum(1) == min(SPEC.ends[SINKS - 1], SPEC.ends[index])).all()
        assert kept[sinks].all()


@pytest.mark.parametrize("budget", ["0.1", "0.5", "20"])
def test_streaming_llm_keeps_exactly_sinks_and_recent(budget: str) -> None:
    room = Budget.parse(budget, SPEC).tokens // SPEC.all_heads
    for _, index, position, kept in answers("streaming_llm", budget):
        end, sinks = SPEC.ends[index], SPEC.ends[SINKS - 1]
        expected = [p for p in range(end) if p < sinks or p >= end - (room - sinks)]
        assert len(expected) == min(room, end)
        for row in range(len(position)):
            assert position[row][kept[row]].tolist() == expected


@pytest.mark.parametrize("name", ["heatkv", "naive_heatkv", "binary_heatkv"])
def test_heatkv_keeps_what_its_schedule_says(name: str) -> None:
    cache = cache_of(name, "0.25")
    run(cache, SPEC, tokens_of(SPEC, 2))
    schedule = cache.method.schedule
    # The cache moves on to the next scale's state as soon as a layer ran, so only whole scales compare.
    held = torch.tensor(cache.ledger.tokens_after)
    assert (held <= torch.from_numpy(schedule.cached_after)).all()
    lengths = torch.tensor(SPEC.lengths)
    for k in range(1, len(SPEC.segments)):
        present = ~torch.from_numpy(schedule.absent[k, :k])
        assert held[k - 1, -1] == (present.sum((1, 2)) * lengths[:k]).sum()
    assert schedule.absent.any()


@pytest.mark.parametrize("method", [HeatKV, BinaryHeatKV])
def test_heatkv_without_order_says_what_to_do(method: type[HeatKV]) -> None:
    with pytest.raises(ValueError, match=r"method.orders: .*task=calibrate"):
        method(SINKS).prepare(SPEC, Budget.parse("0.5", SPEC))


@pytest.mark.parametrize("sinks", [-1, 6])
@pytest.mark.parametrize("method", [HeatKV, BinaryHeatKV, StreamingLLM])
def test_sinks_out_of_range_are_refused(method: Callable[[int], Method], sinks: int) -> None:
    with pytest.raises(ValueError, match=f"sinks={sinks}"):
        method(sinks).check(SPEC, Budget.parse("0.5", SPEC))


@pytest.mark.parametrize(
    ("remove", "left"),
    [
        ("none", {0, 1, 2, 3, 4}),
        ("condensed", {2, 3, 4}),
        ("intermediate", {0, 1, 3, 4}),
        ("local", {0, 1, 2}),
        ("all", set()),
    ],
)
def test_scale_groups_leave_one_group_out(remove: str, left: set[int]) -> None:
    method = prepared(ScaleGroups(remove), SPEC)
    cache, seen = KVCache(SPEC, method, dtype=torch.float32), listening(method)
    run(cache, SPEC, tokens_of(SPEC, 2))
    for asked in seen:
        expected = [
            p for s in SPEC.segments[: asked.scale + 1] if s.index in left for p in range(s.start, s.end)
        ]
        assert asked.ids() == [expected] * len(asked.position)
    assert len(seen) == SPEC.layers * 5


def test_groups_that_overlap_are_refused() -> None:
    with pytest.raises(ValueError, match=r"method\.condensed=3, method\.local=3: small caches 5 scales"):
        ScaleGroups(condensed=3, local=3).check(SPEC, Budget.parse(1, SPEC))
