"""Generations of next-token models on a GPU that is not there: real widths, two layers, images of few rows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from benchmarks.support.build import built, composed
from benchmarks.support.fake_gpu import NoNoise
from kvbench.engine.cache import KVCache
from kvbench.engine.recording.graphs import GraphRecorder
from kvbench.methods.shared.base import Method
from kvbench.models.token_loop import DrawnTexts
from tests.support.fake_device import CUDA
from tests.support.fake_models import loaded, prepared
from tests.support.marks import slow_except
from tests.support.methods import mark_by_kind, methods_for

METHODS = mark_by_kind(methods_for("next-token"), "headkv")
SHORT = {
    "llamagen_xl": ("model.transformer.grid=[3,24]",),
    "janus_pro_7b": ("model.transformer.image=[4,24]", "model.prompt_tokens=20"),
    "lumina_mgpt_7b_512": ("model.transformer.image=[4,32]", "model.prompt_tokens=64"),
    "emu3_gen": ("model.transformer.image=[4,90]", "model.prompt_tokens=40"),
    "qwen3_8b": ("model.prompt_tokens=20", "model.max_tokens=14", "model.chunk=6"),
}
"""Few tokens of a model of real width."""
PROMPTS = {"llamagen_xl": ["1", "2"]}


class FakeRecord:
    """Does the work once, as a capture does, and nothing again; a number that the host would read is an error."""

    def __init__(self) -> None:
        self.recorded = 0

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], object]]:
        self.recorded += 1
        return work(), lambda: None

    def clear(self) -> None:
        raise AssertionError("nothing runs out of memory")


@pytest.fixture(autouse=True)
def unread(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """In place of what waits once a segment, and of the texts, which the host reads."""
    checked: list[Tensor] = []

    def note(sums: Tensor, segment: int) -> None:
        assert sums.device == CUDA
        checked.append(sums)

    monkeypatch.setattr("kvbench.models.token_loop.require_finite", note)
    monkeypatch.setattr(DrawnTexts, "rows", lambda drawn: [[] for _ in range(len(drawn.tokens))])
    monkeypatch.setattr("kvbench.models.token_loop.CHECK_INTERVAL", 1 << 20)
    monkeypatch.setattr(FakeTensor, "tolist", lambda x: [False] * len(x))
    return checked


def generate(name: str, method: str, record: GraphRecorder | None, monkeypatch: pytest.MonkeyPatch) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model = loaded(name, *SHORT[name])
    chosen: Method = prepared(method, model, 0.9)
    monkeypatch.setattr(chosen, "strict", False)
    if not model.spec.padding_counts:
        for tokens in range(1, model.spec.segments[0].length):
            chosen.plan_for(tokens)  # outside of the mode: calibrations are numbers
    with mode:
        cache = KVCache(model.spec, chosen, dtype=model.compute_dtype(CUDA), device=CUDA, record=record)
        return model.generate(PROMPTS.get(name, ["a red ball", "a ball"]), cache, NoNoise(2))


@pytest.mark.usefixtures("undecided")
@pytest.mark.parametrize("name", slow_except("qwen3_8b".__eq__, SHORT))
def test_every_family(name: str, unread: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    made = generate(name, "full", None, monkeypatch)
    assert len(made) == 2
    assert unread
    if isinstance(made, Tensor):
        assert (made.dtype, made.device.type) == (torch.uint8, "cpu")


@pytest.mark.usefixtures("undecided")
@pytest.mark.parametrize("name", ["llamagen_xl", pytest.param("qwen3_8b", marks=pytest.mark.slow)])
def test_steps_are_recorded_without_a_wait(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    record = FakeRecord()
    generate(name, "h2o", record, monkeypatch)
    assert record.recorded == 1


@pytest.mark.usefixtures("undecided")
@pytest.mark.parametrize("method", METHODS)
def test_methods_look_at_a_gpu(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "llamagen_xl" if method == "forecast" else "qwen3_8b"  # forecasts are for positions of an image
    generate(name, method, None, monkeypatch)


@pytest.mark.usefixtures("undecided")
@pytest.mark.parametrize("name", METHODS)
def test_padded_prompts_lie_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = built(
        composed(["model=janus_pro_1b", "model.transformer.depth=2", "model.prompt_tokens=20"])["model"]
    )
    chosen, spec = prepared(name, model), model.spec
    monkeypatch.setattr(chosen, "strict", False)
    with FakeTensorMode(allow_non_fake_inputs=True):
        cache = KVCache(spec, chosen, dtype=torch.bfloat16, device=CUDA)
        cache.reset(4, [0, 7, 0, 7])
        for segment in spec.segments[:3]:
            cache.begin(segment)
            shape = (3, 4, spec.heads, segment.length, spec.head_dim)
            for layer in range(spec.layers):
                q, k, v = torch.empty(shape, dtype=torch.bfloat16, device=CUDA)
                out = cache.attend(layer, q, k, v, lambda q=q: q)
                assert (out.shape, out.dtype, out.device) == (q.shape, q.dtype, CUDA)
