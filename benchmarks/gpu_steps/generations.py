"""Generations of small models by methods, and their comparison."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_steps.base import Machine, Skipped
from benchmarks.support.build import built, composed, open_cache, prepare_method
from kvbench.engine.cache import KVCache
from kvbench.engine.recording.graphs import GraphRecorder
from kvbench.eval.paired.psnr import decibels, squared_error
from kvbench.methods.shared.base import Method
from kvbench.models.noise import Noise, PromptNoise
from kvbench.models.outputs import Outputs, Text


def shrink(*more: str, **shape: object) -> tuple[str, ...]:
    """Return settings of a transformer with one layer and random weights, and `more` settings."""
    defaults = {"depth": 1, "width": 32, "heads": 2}
    settings = [f"model.transformer.{key}={value}" for key, value in (defaults | shape).items()]
    return ("model.weights=random", "sinks=1", *settings, *more)


MODELS: Mapping[str, tuple[str, ...]] = {
    "infinity_tiny": ("prompts=scenes",),
    "var_tiny": ("prompts=scene_classes",),
    "llamagen_tiny": ("prompts=scenes",),
    "reasoner_tiny": ("prompts=math_tiny", "model.max_tokens=300"),
}
"""Embedded models and the overrides of their prompts; texts may be cut off."""
SHRUNK: Mapping[str, tuple[str, ...]] = {
    "infinity_tiny": shrink(
        "model.sizes=[[1,1],[2,2],[3,3]]", "model.tokenizer.mixers=0", "model.sampling.tau=0.5", width=48, pool_heads=12
    ),
    "var_tiny": shrink(sides="[1,2,3]"),
    "llamagen_tiny": shrink(kv_heads=2, hidden=64, grid="[3,3]"),
    "reasoner_tiny": shrink("sinks=0", "model.max_tokens=14", "model.chunk=5", kv_heads=2, head_dim=16, hidden=64),
}  # fmt: skip
"""Overrides that make models small enough for an interpreter."""


def choose_settings(machine: Machine, name: str) -> list[str]:
    """Return the overrides of an embedded model; a rehearsal's model has random weights and a few tokens."""
    return [f"model={name}", *MODELS[name], *machine.choose((), SHRUNK[name])]


@dataclass
class Generator:
    """A loaded model, the overrides that it was built with, and its prompts."""

    model: Any
    overrides: Sequence[str]
    prompts: list[str]

    def prepare(self, method: Sequence[str], budget: str) -> Method:
        """Prepare a method with a random calibration; skip the case if the method is for models of another family."""
        overrides, spec = [*self.overrides, *method], self.model.spec
        families = built(composed(overrides)["method"]).families
        if spec.family not in families:
            raise Skipped(f"{method[0]} is for {families[0]} models")
        return prepare_method(spec, budget, overrides)

    def open_cache(
        self, method: Method, stored: str | None = None, record: GraphRecorder | None = None
    ) -> KVCache:
        """Return a cache, in low-bit storage if `stored` names a `cache_dtype`."""
        return open_cache(self.model, method, self.model._device, stored, record)

    def draw(self, cache: KVCache, prompts: int | None = None, noise: Noise | None = None) -> Outputs:
        """Generate images or texts for the first prompts, all by default; the default noise is a stream per prompt."""
        texts = self.prompts[:prompts]
        outputs: Outputs = self.model.generate(texts, cache, noise or PromptNoise(0, range(len(texts))))
        return outputs


def load(overrides: Sequence[str], prompts: int, device: str, dtype: torch.dtype | None = None) -> Generator:
    """Load a model, whose blocks compute in `dtype` unless it is None, and its prompts."""
    values = composed(overrides)
    model = built(values["model"])
    if dtype is not None:
        model.compute_dtype = lambda _: dtype
    model.load(device)
    texts = [prompt.text for prompt in built({**values["prompts"], "count": prompts}).load()]
    return Generator(model, overrides, texts)


def compare(found: Outputs, expected: Outputs) -> list[float]:
    """Return the similarity of every sample: PSNR in dB of images (100 if equal), share of equal leading text."""
    if isinstance(found, Tensor) and isinstance(expected, Tensor):
        return [measure_psnr(*images) for images in zip(found, expected, strict=True)]
    return [measure_agreement(*texts) for texts in zip(found, expected, strict=True)]


def measure_psnr(found: Tensor, expected: Tensor) -> float:
    """Return the PSNR of an image uint8 [H, W, 3], at most 100 dB."""
    mse = np.float64(squared_error(found.numpy(), expected.numpy()) / found.numel())
    return min(100.0, float(decibels(mse)))


def measure_agreement(found: Text, expected: Text) -> float:
    """Return the share of a text before the first character that differs."""
    longest = max(len(found.text), len(expected.text))
    same = takewhile(lambda pair: pair[0] == pair[1], zip(found.text, expected.text, strict=False))
    return sum(1 for _ in same) / longest if longest else 1.0


def are_equal(found: Outputs, expected: Outputs) -> bool:
    """Return whether two batches are equal, byte for byte."""
    if isinstance(found, Tensor) and isinstance(expected, Tensor):
        return torch.equal(found, expected)
    return list(found) == list(expected)
