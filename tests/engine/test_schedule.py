"""A static method's schedule: every layer's changes as if it were asked alone, shared where layers are alike."""

from collections.abc import Callable

import pytest
import torch

from kvbench.core.segments import ModelSpec, Segment, next_scale, next_token
from kvbench.engine.schedule import Schedule, build_schedule, count_free_slots, plan_change, show_layer
from kvbench.kernels.layout import empty_layout
from kvbench.methods.full import Full
from kvbench.methods.heatkv.method import HeatKV
from kvbench.methods.heatkv.scores import AttentionByScale
from kvbench.methods.shared.base import Method
from kvbench.methods.streaming_llm import StreamingLLM
from tests.support.engine import prepared

SCALES = next_scale([(1, 1), (2, 2), (3, 3), (4, 4), (5, 5)])
TOKENS = next_token(4, [3] * 6)
METHODS: dict[str, Callable[[], Method]] = {
    "full": Full,
    "streaming_llm": lambda: StreamingLLM(1),
    "heatkv": lambda: HeatKV(1),
}


def prepare(name: str, spec: ModelSpec, budget: float | str) -> Method:
    return prepared(METHODS[name](), spec, budget, AttentionByScale().make_random_artifact(spec))


def ask_each_layer(spec: ModelSpec, method: Method) -> Schedule:
    """Every layer by itself, one after the other."""
    changes = {}
    for layer in range(spec.layers):
        layout = empty_layout(spec.heads, "cpu", count_free_slots(spec, 0))
        for at in spec.segments[:-1]:
            view = show_layer(layer, at, layout, spec)
            changes[layer, at.index] = plan_change(method, view, layout, count_free_slots(spec, at.index + 1))
            layout = changes[layer, at.index].layout
    return changes


@pytest.mark.parametrize("segments", [SCALES, TOKENS], ids=["scales", "tokens"])
@pytest.mark.parametrize(("name", "budget"), [("full", 1), ("streaming_llm", "0.35"), ("heatkv", "0.5")])
def test_layers_change_as_each_alone(name: str, budget: str, segments: tuple[Segment, ...]) -> None:
    spec = ModelSpec("small", 5, 3, 8, segments, 1)
    method = prepare(name, spec, budget)
    found, expected = build_schedule(spec, method), ask_each_layer(spec, method)
    assert found.keys() == expected.keys()
    for at, change in expected.items():
        assert found[at].appends == change.appends
        assert torch.equal(found[at].source, change.source)
        for one, other in zip(found[at].layout, change.layout, strict=True):
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_layers_that_are_alike_share_their_changes() -> None:
    """Ten tokens more than 7 in each of 15 heads: layers of 8, 8, 8, then one of 8, 7 and 7, then one of 7."""
    spec = ModelSpec("small", 5, 3, 8, TOKENS, 1)
    budget = f"{(15 * 7 + 10) / spec.full_tokens:.6f}"
    found = build_schedule(spec, prepare("streaming_llm", spec, budget))
    last = len(spec.segments) - 2
    assert [sum(found[layer, last].layout.counts) for layer in range(5)] == [24, 24, 24, 22, 21]
    assert found[0, last] is found[1, last] is found[2, last]
    assert len({id(found[layer, last]) for layer in range(5)}) == 3
