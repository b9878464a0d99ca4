"""Step that measures LlamaGen-XL with random weights: tokens per second with and without CUDA graphs, noise."""

from collections.abc import Iterator
from functools import partial
from typing import Any, get_args

import torch

from benchmarks.gpu_steps.base import Case, Failed, Figures, Machine
from benchmarks.gpu_steps.generations import are_equal, shrink
from benchmarks.gpu_steps.timing import time_turns
from benchmarks.support.build import build_model, open_cache, prepare_method
from kvbench.engine.recording.graphs import GraphRecorder
from kvbench.models.llamagen.model import LlamaGenModel
from kvbench.models.noise import Kind, Noise, make_noise
from kvbench.profile.stopwatch import HostClock, Phases

TOKENIZER = ("codes=128", "latents=16", "widths=[32,32,64]", "blocks=1")
SHRUNK = shrink(
    *(f"model.tokenizer.{setting}" for setting in TOKENIZER),
    kv_heads=2,
    head_dim=16,
    hidden=64,
    vocabulary=128,
    grid="[3,3]",
)
"""Overrides that make the model small enough for an interpreter."""


def list_cases(machine: Machine) -> Iterator[Case]:
    """Yield a case per kind of noise, in which runs with and without graphs take turns on one model."""
    for kind in get_args(Kind):
        yield Case(f"tokens per second, {kind}", partial(race, machine, machine.choose(8, 1), kind))


def race(machine: Machine, batch: int, kind: Kind) -> Figures:
    """Time generations without graphs and with them; the images must be equal."""
    model = build_model("llamagen_xl", "model.weights=random", *machine.choose((), SHRUNK))
    assert isinstance(model, LlamaGenModel)
    model.load(machine.device)
    records = {"plain": None, "graphs": machine.make_record(model.spec)}
    if machine.interpreted:
        del records["graphs"]
    runs = {name: Generation(machine, model, batch, record, kind) for name, record in records.items()}
    with machine.branches():
        seconds = time_turns(machine, dict(runs), machine.choose(2, 1))
        # Noise by counter is a part of the programs that draw tokens.
        shares = {name: one.measure_noise() for name, one in runs.items() if kind == "stream"}
    if not are_equal(runs["plain"].images, [*runs.values()][-1].images):
        raise Failed("images with graphs are not those without")
    tokens = batch * model.spec.drawn_tokens
    rates = {f"tokens_per_second {name}": round(tokens / each, 1) for name, each in seconds.items()}
    return rates | {f"noise_share {name}": round(share, 4) for name, share in shares.items()}


class Generation:
    """One batch of images by the full cache; prompts are class numbers."""

    def __init__(
        self, machine: Machine, model: LlamaGenModel, batch: int, record: GraphRecorder | None, kind: Kind
    ) -> None:
        method = prepare_method(model.spec, "1", [f"model={model.name}", "method=full"])
        self._cache = open_cache(model, method, machine.device, record=record)
        self._model, self._batch, self._clock = model, batch, HostClock(machine.device)
        self._make_noise = partial(make_noise, kind, 0, range(batch), machine.device)
        self.images: Any = torch.empty(0)

    def __call__(self) -> None:
        """Draw the images."""
        self._draw(self._make_noise())

    def measure_noise(self) -> float:
        """Return the share of a generation's time that the host spends on noise."""
        noise, phases = self._make_noise(), Phases(self._clock)
        phases.run(lambda: self._draw(noise), {"noise": [(noise, "draw")]})
        self._clock.wait()
        return phases.seconds().get("noise", 0.0) / phases.total()

    def _draw(self, noise: Noise) -> None:
        prompts = [str(number) for number in range(self._batch)]
        self.images = self._model.generate(prompts, self._cache, noise)
