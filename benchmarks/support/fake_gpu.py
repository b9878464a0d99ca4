"""Whole generations on a simulated GPU, to observe their operations: tensors have shapes but no data.

Models have their real shapes. Triton kernels are not launched, but their launchers allocate outputs. Scalars that the
host would read from the device are replaced: checks of logits pass, and row lengths are computed in advance.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import cycle
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from benchmarks.support.build import built, composed, open_cache, prepare_method
from benchmarks.support.device_watch import DeviceWatch
from benchmarks.support.triton_launches import Variant, record_launches
from kvbench.engine.schedule import Ints, predict_row_lengths
from kvbench.kernels.layout import Layout, arrange_rows
from kvbench.methods.shared.base import Method
from kvbench.models.files.parameters import set_parameter
from kvbench.models.image_model import ImageModel
from kvbench.models.infinity.model import InfinityModel
from kvbench.models.llamagen.model import LlamaGenModel
from kvbench.models.next_token import LinedImageModel, NextTokenModel
from kvbench.models.noise import CounterNoise, Kind, Noise
from kvbench.models.parts.text_decoder import TextDecoder
from kvbench.models.text_model import TextModel
from kvbench.models.var.model import VARModel
from kvbench.scenes.grammar import evaluation_prompts

CUDA = torch.device("cuda:0")
MULTIPROCESSORS = 132
"""Multiprocessors of an H100 or H200."""


Model = InfinityModel | VARModel | NextTokenModel[Any]


def prepare(overrides: Sequence[str]) -> tuple[Model, Method]:
    """Return a model without weights and a method with a random calibration, for overrides of `run.py`."""
    settings = composed([*overrides, "model.weights=random"])
    model = built(settings["model"])
    return model, prepare_method(model.spec, settings["budget"], overrides)


def run(
    model: Model,
    method: Method,
    batch: int,
    watch: DeviceWatch,
    launches: list[Variant] | None = None,
    *,
    before: int = 0,
    record: "CountedReplays | None" = None,
    kind: Kind = "counter",
) -> None:
    """Run one generation of a batch under a watch.

    Args:
        model: a model without weights.
        method: a method prepared for the model.
        batch: prompts.
        watch: observes every operation of torch.
        launches: receives the launches of Triton kernels in the watched generation.
        before: generations before the watched generation; the first builds a static method's tables.
        record: counts replays of steps, or of the scales recorded in the second generation; None runs all by launches.
        kind: kind of noise; `counter` is a GPU's.

    Raises:
        ValueError: the number of tokens that the method keeps depends on data.
    """
    lengths = predict_row_lengths(model.spec, method)
    if lengths is None:
        raise ValueError(f"{type(method).__name__}: the number of tokens that it keeps depends on data")
    rows = lengths if method.static else np.tile(lengths, model.spec.branches * batch)
    prompts = list_prompts(model, batch)
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        stand_ins(rows.reshape(-1, rows.shape[2])),
        record_launches(launches),
    ):
        load(model)
        cache = open_cache(model, method, CUDA, record=record)
        start = len(launches or ())
        for _ in range(before):
            with type(watch)():
                model.generate(prompts, cache, make_noise_of(kind, batch))
        if launches is not None:
            del launches[start:]
        if record is not None:
            record.replays = 0
        with watch:
            model.generate(prompts, cache, make_noise_of(kind, batch))


def list_prompts(model: Model, batch: int) -> list[str]:
    """Return prompts that the model accepts: class ids or captions."""
    if isinstance(model, VARModel) or (isinstance(model, LlamaGenModel) and model.text is None):
        return [str(number) for number in range(batch)]
    return list_captions(batch)


def list_captions(count: int) -> list[str]:
    """Return `count` captions of the embedded evaluation set."""
    return [str(line["prompt"]) for line in evaluation_prompts(count)]


def load(model: Model) -> None:
    """Give a model networks on the device as `load` would, without data."""
    with torch.device(CUDA):
        if isinstance(model, TextModel):
            model._transformer = TextDecoder(model.transformer)
        else:
            transformer, tokenizer = model.networks
            model._transformer, model._tokenizer = transformer(model.transformer), tokenizer(model.tokenizer)
        model._text, _ = model._read_text(CUDA)
        if isinstance(model, LinedImageModel):
            model._codes = torch.empty(model.transformer.vocabulary, dtype=torch.int64)
    for name, parameter in [*model._transformer.named_parameters()]:
        # A module's `to` would keep the parameters' dtype in fake mode.
        dtype = model._find_dtype(name, CUDA) if isinstance(model, ImageModel) else model.compute_dtype(CUDA)
        set_parameter(model._transformer, name, parameter.to(dtype))
    model._device = CUDA
    if isinstance(model, ImageModel):
        model._prepare_networks(CUDA)
    else:
        model._transformer.prepare_for(CUDA)


@contextmanager
def stand_ins(lengths: Ints) -> Iterator[None]:
    """Replace everything that needs a device or data: pinned memory, properties, the tables of a cache.

    `lengths`, int64 [changes, rows], has the slots of every row after each change of a layer, in order.
    """

    def replay_table(*given: Any) -> tuple[Layout, Tensor]:
        counts, free_slots = next(recorded), given[4]
        positions = torch.empty(len(counts), max(counts), dtype=torch.int64, device=CUDA)
        after = arrange_rows(positions, counts, free_slots)
        return after, torch.empty(after.capacity, dtype=torch.int32, device=CUDA)

    convolve = functional.conv2d

    def convolve_as_cudnn(x: Tensor, weight: Tensor, *more: Any) -> Tensor:
        """Keep channels last, as libraries on a GPU do; simulated convolutions return contiguous images."""
        out = convolve(x, weight, *more)
        if weight.is_contiguous() or not weight.is_contiguous(memory_format=torch.channels_last):
            return out
        channels, height, width = out.shape[1:]
        return out.as_strided(out.shape, (channels * height * width, 1, width * channels, channels))

    interpolate = functional.interpolate

    def interpolate_as_cuda(x: Tensor, size: Any = None, scale_factor: Any = None, **how: Any) -> Tensor:
        """Double channels-last images by one kernel that keeps their order; its simulation makes two copies."""
        if scale_factor != 2.0 or x.is_contiguous() or not x.is_contiguous(memory_format=torch.channels_last):
            return interpolate(x, size, scale_factor, **how)
        shape = (*x.shape[:2], *(2 * side for side in x.shape[2:]))
        return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)

    recorded = cycle(lengths.tolist())
    with ExitStack() as stack:
        device = SimpleNamespace(
            name="NVIDIA H200", major=9, minor=0,
            multi_processor_count=MULTIPROCESSORS, shared_memory_per_block_optin=227 << 10,
        )  # fmt: skip
        stack.enter_context(patch("torch.cuda.get_device_properties", lambda _: device))
        stack.enter_context(patch.object(functional, "interpolate", interpolate_as_cuda))
        stack.enter_context(patch.object(functional, "conv2d", convolve_as_cudnn))
        stack.enter_context(patch.object(Tensor, "pin_memory", lambda tensor: tensor))
        stack.enter_context(patch("kvbench.models.noise.use_device"))
        for compared in (
            "engine.schedule.are_equal",
            "engine.recording.host_copies.are_same",
        ):  # without data
            stack.enter_context(patch(f"kvbench.{compared}", lambda *_, same="same" in compared: same))
        stack.enter_context(patch("kvbench.engine.schedule.source_table", replay_table))
        yield


def make_noise_of(kind: Kind, prompts: int) -> Noise:
    """Return noise without data for a number of prompts."""
    if kind == "stream":
        return NoNoise(prompts)
    keys, step = (torch.empty(size, dtype=torch.int64, device=CUDA) for size in (prompts, 1))
    return CounterNoise(keys, step)


class CountedReplays:
    """Recorder that runs work once and counts its replays, which compute nothing.

    Attributes:
        replays: number of replays after the one that follows a recording.
    """

    def __init__(self) -> None:
        self.replays = 0

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], object]]:
        """Run work in place of recording it."""
        out, self.replays = work(), self.replays - 1

        def count() -> None:
            self.replays += 1

        return out, count

    def make_room(self) -> None:
        """Do nothing, as nothing holds memory."""

    def clear(self) -> None:
        """Do nothing, as nothing holds memory."""


class NoNoise:
    """Noise without data, for a number of prompts."""

    def __init__(self, prompts: int) -> None:
        self._prompts = prompts

    def draw(self, count: int) -> Tensor:
        """Return float32 [prompts, count] without data on the CPU."""
        return torch.empty(self._prompts, count)
