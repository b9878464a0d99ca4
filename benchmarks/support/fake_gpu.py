"""Whole generations on a GPU that is not there, to learn what they allocate: tensors have sizes but no numbers.

Models have their real shapes. Triton programs are not launched, but what their launchers allocate is. What the host
reads back from the device is replaced: checks of logits pass, and how many tokens a method keeps is worked out before.
"""

import weakref
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import cycle
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.support.build import built, composed, prepare_method
from benchmarks.support.caching_allocator import Event
from benchmarks.support.device_watch import DeviceWatch
from benchmarks.support.triton_launches import replace_launches
from kvbench.engine.cache import KVCache
from kvbench.engine.schedule import Ints, predict_row_lengths
from kvbench.kernels.layout import Layout, arrange_rows
from kvbench.methods.shared.base import Method
from kvbench.models.infinity.model import InfinityModel
from kvbench.models.llamagen.model import LlamaGenModel
from kvbench.models.lumina.model import LuminaModel
from kvbench.models.next_token import NextTokenModel
from kvbench.models.qwen3.model import Qwen3Model
from kvbench.models.qwen3.transformer import Qwen3
from kvbench.models.var.model import VARModel
from kvbench.scenes.grammar import evaluation_prompts

CUDA = torch.device("cuda:0")
CASES = (("full", "1"), ("heatkv", "0.1"), ("heatkv", "0.04"), ("snapkv", "0.1"))
"""Methods and budgets that are shown by default; the last method looks at data."""
PROCESSORS = 132
"""Multiprocessors of an H100 and of an H200."""


class Recorder(DeviceWatch):
    """Notes when memory of the device is allocated and when it is freed.

    Memory that was there before, such as weights, is left out.

    Attributes:
        events: allocations and frees, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self._known: set[int] = set()

    def note_inputs(self, tensors: list[Tensor]) -> None:
        """Know the memory that was there before."""
        for storage in self._list_new(tensors):
            self._meet(storage, None)

    def note_operation(self, func: Any, args: Any, kwargs: Any, results: list[Tensor]) -> None:
        """Note the memory of results."""
        for storage in self._list_new(results):
            if storage.nbytes():
                number = len(self.events)
                self.events.append(Event(number, storage.nbytes()))
                self._meet(storage, number)

    def _list_new(self, tensors: list[Tensor]) -> Iterator[torch.UntypedStorage]:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device.type == "cuda" and storage._cdata not in self._known:
                yield storage

    def _meet(self, storage: torch.UntypedStorage, number: int | None) -> None:
        """Know a storage while it lives: its address may be that of another one afterwards."""
        self._known.add(storage._cdata)
        weakref.finalize(storage, self._forget, storage._cdata, number).atexit = False

    def _forget(self, address: int, number: int | None) -> None:
        self._known.discard(address)
        if number is not None:
            self.events.append(Event(number, None))


Model = InfinityModel | VARModel | NextTokenModel[Any]


def prepare(overrides: Sequence[str]) -> tuple[Model, Method]:
    """Return a model without weights and a method prepared for it; random numbers stand for a calibration.

    Args:
        overrides: choices and settings `key=value`, as on the command line of `run.py`: `model`, `method`, `budget`.
    """
    settings = composed([*overrides, "model.weights=random"])
    model = built(settings["model"])
    return model, prepare_method(model.spec, settings["budget"], overrides)


def prepare_cases(options: Namespace) -> Iterator[tuple[str, str, tuple[Model, Method]]]:
    """Yield method, budget, and both prepared (`prepare`), for the options' method or for each of `CASES`."""
    for method, budget in ((options.method, options.budget),) if options.method else CASES:
        choices = [f"model={options.model}", f"method={method}", f"budget={budget}", *options.overrides]
        yield method, budget, prepare(choices)


def record(model: Model, method: Method, batch: int) -> list[Event]:
    """Return what one generation of a batch allocates and frees on the device (`run`)."""
    recorder = Recorder()
    run(model, method, batch, recorder)
    return recorder.events


def run(
    model: Model,
    method: Method,
    batch: int,
    watch: DeviceWatch,
    launched: Counter[str] | None = None,
    *,
    first: bool = True,
) -> None:
    """Run one generation of a batch under a watch.

    Args:
        model: without weights.
        method: prepared for it.
        batch: prompts.
        watch: sees every operation of torch.
        launched: counts launches of Triton programs by name.
        first: watch the first generation, in which a static method's tables are made; else the second.

    Raises:
        ValueError: how many tokens the method keeps depends on data.
    """
    lengths = predict_row_lengths(model.spec, method)
    if lengths is None:
        raise ValueError(f"{type(method).__name__}: how many tokens it keeps depends on data")
    kept = lengths if method.static else np.tile(lengths, model.spec.branches * batch)
    prompts = list_prompts(model, batch)
    with FakeTensorMode(allow_non_fake_inputs=True), stand_ins(kept.reshape(-1, kept.shape[2]), launched):
        load(model)
        cache = KVCache(model.spec, method, dtype=model.compute_dtype(CUDA), device=CUDA)
        if not first:
            with type(watch)():
                model.generate(prompts, cache, NoNoise(batch))
            if launched is not None:
                launched.clear()
        with watch:
            model.generate(prompts, cache, NoNoise(batch))


def list_prompts(model: Model, batch: int) -> list[str]:
    """Return so many prompts that the model reads: classes or captions."""
    if isinstance(model, VARModel) or (isinstance(model, LlamaGenModel) and model.text is None):
        return [str(number) for number in range(batch)]
    return [str(line["prompt"]) for line in evaluation_prompts(batch)]


def load(model: Model) -> None:
    """Give a model networks on the device as `load` would, of whatever numbers."""
    with torch.device(CUDA):
        if isinstance(model, Qwen3Model):
            model._transformer = Qwen3(model.transformer)
        else:
            transformer, tokenizer = model.networks
            model._transformer, model._tokenizer = transformer(model.transformer), tokenizer(model.tokenizer)
        model._text, _ = model._read_text(CUDA)
        if isinstance(model, LuminaModel):
            model._codes = torch.empty(model.transformer.vocabulary, dtype=torch.int64)
    exact = ("scale_mul_1H11", "ada_gss") if isinstance(model, VARModel) else ()
    next_token = isinstance(model, NextTokenModel)
    for part in [model._transformer] if next_token else model._transformer.layers:
        for owner in part.modules():  # `to` would keep the parameters' dtype in fake mode
            for name, parameter in owner.named_parameters(recurse=False):
                dtype = torch.float32 if name in exact else model.compute_dtype(CUDA)
                owner._parameters[name] = nn.Parameter(parameter.to(dtype))
    model._device = CUDA


@contextmanager
def stand_ins(kept: Ints, launched: Counter[str] | None = None) -> Iterator[None]:
    """Replace what needs a device or numbers: launches, pinned memory, the tables of a cache.

    Args:
        kept: int64 [changes, rows], slots of every row after each change of a layer, in the order of the changes of a
            generation.
        launched: counts launches by name.
    """

    def replay_table(*_: object) -> tuple[Layout, Tensor]:
        counts = next(recorded)
        positions = torch.empty(len(counts), max(counts), dtype=torch.int64, device=CUDA)
        after = arrange_rows(positions, counts)
        return after, torch.empty(after.total, dtype=torch.int32, device=CUDA)

    def note(name: str, *_: object, **__: object) -> None:
        if launched is not None:
            launched[name] += 1

    recorded = cycle(kept.tolist())
    with ExitStack() as stack:
        stack.enter_context(replace_launches(note))
        device = SimpleNamespace(
            name="NVIDIA H200", major=9, minor=0,
            multi_processor_count=PROCESSORS, shared_memory_per_block_optin=227 << 10,
        )  # fmt: skip
        stack.enter_context(patch("torch.cuda.get_device_properties", lambda _: device))
        stack.enter_context(patch.object(Tensor, "pin_memory", lambda numbers: numbers))
        stack.enter_context(patch("kvbench.models.noise.use_device"))
        stack.enter_context(patch("kvbench.engine.schedule.are_equal", lambda *_: False))  # without data
        stack.enter_context(patch("kvbench.engine.schedule.source_table", replay_table))
        yield


class NoNoise:
    """Noise of so many prompts, without numbers."""

    def __init__(self, prompts: int) -> None:
        self._prompts = prompts

    def draw(self, count: int) -> Tensor:
        """Return float32 [prompts, count] on the CPU."""
        return torch.empty(self._prompts, count)
