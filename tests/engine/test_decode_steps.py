"""Decode steps on a GPU that is not there: the host waits for nothing, and steps of a segment are launched alike."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.launches import Watch
from benchmarks.support.fake_gpu import NoNoise
from kvbench.core.segments import ModelSpec
from kvbench.engine import cache as cache_module
from kvbench.engine.cache import KVCache
from kvbench.engine.schedule import build_schedule
from kvbench.methods.full import Full
from kvbench.methods.shared.base import Method
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.models.llamagen.sampling import LlamaGenSampling
from kvbench.models.llamagen.transformer import LlamaGen, LlamaGenConfig
from kvbench.models.token_loop import ImageHead, draw_tokens
from tests.support import fake_gpus
from tests.support.engine import prepared
from tests.support.fake_device import CUDA, faked

pytest.importorskip("triton")

from benchmarks.support.triton_launches import replace_launches
from kvbench.kernels.triton import decode_attention, softmax
from tests.support.fake_kernels import check, check_storage

LAYERS, PROMPTS = 2, 2


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    check_storage(monkeypatch)
    with replace_launches(check):
        yield
        monkeypatch.undo()  # while launches are replaced, of which the test replaced some again


def locate(x: Tensor) -> tuple[object, ...]:
    return x.untyped_storage()._cdata, x.storage_offset(), x.shape


class Launch:
    """A Triton program that notes what it is given."""

    def __init__(self) -> None:
        self.given: list[tuple[object, ...]] = []

    def __getitem__(self, grid: object) -> Callable[..., None]:
        def launch(*given: object, **settings: object) -> None:
            assert all(x.device == CUDA for x in given if isinstance(x, Tensor))
            self.given.append((grid, *given, *settings.items()))

        return launch


class Device:
    """A model on the device, watched; of a caption with many tokens, keys are split between programs."""

    def __init__(self, caption: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.config = LlamaGenConfig(
            depth=LAYERS, width=256, heads=4, kv_heads=2, head_dim=64, hidden=512, vocabulary=512,
            grid=(4, 9), text_width=64, text_tokens=caption,
        )  # fmt: skip
        self.spec: ModelSpec = self.config.describe("small", self.config.segments(self.config.condition), 2)
        self.kernel, self.merge, self.watch = Launch(), Launch(), Watch()
        self.passes: list[tuple[int, int]] = []
        self._patch = monkeypatch
        monkeypatch.setattr(Tensor, "pin_memory", lambda numbers: numbers)
        monkeypatch.setattr(decode_attention, "decode_kernel", self.kernel)
        monkeypatch.setattr(softmax, "merge_kernel", self.merge)
        monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: fake_gpus.Device())

    def generate(self, method: Method) -> None:
        chosen = prepared(method, self.spec, 1 if isinstance(method, Full) else self.config.condition + 10)
        schedule = build_schedule(self.spec, chosen)
        with FakeTensorMode(allow_non_fake_inputs=True):
            on_device = {at: faked(change) for at, change in schedule.items()}
            self._patch.setattr(cache_module, "build_schedule", lambda *_: on_device)
            with torch.device(CUDA):
                model = LlamaGen(self.config)
            for owner in model.modules():  # `to` would keep the parameters' dtype in fake mode
                for name, parameter in owner.named_parameters(recurse=False):
                    owner._parameters[name] = nn.Parameter(parameter.to(torch.bfloat16))
            model.prepare_for(CUDA)
            self._patch.setattr(model, "forward", self._note(model.forward))
            cache = KVCache(self.spec, chosen, dtype=torch.bfloat16, device=CUDA)
            shape = (2 * PROMPTS, self.config.condition, self.config.width)
            condition = torch.empty(shape, dtype=torch.bfloat16, device=CUDA)
            sampling = LlamaGenSampling(top_k=20, top_p=0.9)
            with self.watch:
                tokens = draw_tokens(
                    model, condition, self.spec.segments, cache, NoNoise(PROMPTS), ImageHead(sampling)
                ).tokens
        assert (tokens.shape, tokens.device) == ((PROMPTS, 36), CUDA)

    def _note(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*given: Any) -> Tensor:
            before = self.watch.operations.total(), self.watch.waits.total()
            out = forward(*given)
            self.passes.append(
                (self.watch.operations.total() - before[0], self.watch.waits.total() - before[1])
            )
            return out

        return run


@pytest.mark.slow
@pytest.mark.parametrize("caption", [20, 600], ids=["whole", "split"])
@pytest.mark.parametrize("method", [Full(), StreamingLLM(sinks=1)], ids=["full", "streaming_llm"])
def test_steps_of_a_segment_are_alike(method: Method, caption: int, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(caption, monkeypatch)
    device.generate(method)
    segments = device.spec.segments
    steps = sum(segment.length for segment in segments[1:])
    assert len(device.passes) == 1 + steps
    assert {waits for _, waits in device.passes} == {0}
    # Beside them: one look per segment at whether all logits were finite, and the table of rotations, once.
    assert device.watch.waits.total() == len(segments) + 1
    assert len(device.kernel.given) == steps * LAYERS
    assert len(device.merge.given) == (steps * LAYERS if caption == 600 else 0)
    # What a launch is given but for tensors that a step makes: grid, storage, tables, counter, sizes, strides.
    alike = [
        tuple(locate(x) if isinstance(x, Tensor) else x for x in (launch[0], *launch[4:6], *launch[9:]))
        for launch in device.kernel.given
    ]
    for layer in range(LAYERS):
        assert len(set(alike[layer::LAYERS])) == 1
    start = 0
    for segment in segments[1:]:
        operations = [count for count, _ in device.passes[1 + start : 1 + start + segment.length]]
        assert len(set(operations[1:-1])) == 1
        start += segment.length
    assert len({launch[-7:] for launch in alike}) == 1  # one variant
