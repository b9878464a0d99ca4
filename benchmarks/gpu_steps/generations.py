"""Generations of a small model by a method, as the steps of the check compare them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_steps.base import Skipped
from benchmarks.support.build import built, composed, prepare_method
from kvbench.core.graphs import Record
from kvbench.core.storage import CODE_DTYPES, StorageConfig
from kvbench.engine.cache import KVCache
from kvbench.engine.coding.formats import Packing
from kvbench.methods.shared.base import Method
from kvbench.models.noise import PromptNoise
from kvbench.models.outputs import Outputs, Text


def shrink(*more: str, **shape: object) -> tuple[str, ...]:
    """Return settings of a transformer of one layer and random weights.

    Args:
        more: other settings.
        shape: settings of the transformer.
    """
    usual = {"depth": 1, "width": 32, "heads": 2}
    settings = [f"model.transformer.{key}={value}" for key, value in (usual | shape).items()]
    return ("model.weights=random", "sinks=1", *settings, *more)


MODELS: Mapping[str, tuple[str, ...]] = {
    "infinity_tiny": ("prompts=scenes",),
    "var_tiny": ("prompts=scene_classes",),
    "llamagen_tiny": ("prompts=scenes",),
    "reasoner_tiny": ("prompts=math_tiny", "model.max_tokens=300"),
}
"""Embedded models, with prompts that they read, and texts that need not come to their end."""
SHRUNK: Mapping[str, tuple[str, ...]] = {
    "infinity_tiny": shrink(
        "model.sizes=[[1,1],[2,2],[3,3]]", "model.tokenizer.mixers=0", "model.sampling.tau=0.5", width=48, pool_heads=12
    ),
    "var_tiny": shrink(sides="[1,2,3]"),
    "llamagen_tiny": shrink(kv_heads=2, hidden=64, grid="[3,3]"),
    "reasoner_tiny": shrink("sinks=0", "model.max_tokens=14", "model.chunk=5", kv_heads=2, head_dim=16, hidden=64),
}  # fmt: skip
"""Overrides that make models small enough for an interpreter."""


@dataclass
class Generator:
    """A loaded model and its prompts.

    Attributes:
        model: of `conf/model`, its weights loaded.
        overrides: that it was built of.
        prompts: texts.
    """

    model: Any
    overrides: Sequence[str]
    prompts: list[str]

    def prepare(self, method: Sequence[str], budget: str) -> Method:
        """Prepare a method; random numbers stand for its calibration.

        Args:
            method: choices and settings `key=value`.
            budget: as on the command line.

        Raises:
            Skipped: the method is for models of another family.
            ValueError: it does not fit the model, or the budget is too small for it.
        """
        overrides, spec = [*self.overrides, *method], self.model.spec
        families = built(composed(overrides)["method"]).families
        if spec.family not in families:
            raise Skipped(f"{method[0]} is for {families[0]} models")
        return prepare_method(spec, budget, overrides)

    def open_cache(
        self, method: Method, dtype: torch.dtype, stored: str | None = None, record: Record | None = None
    ) -> KVCache:
        """Return a cache of numbers of a dtype, or of one in few bits as `cache_dtype` names it."""
        packing = None
        if stored is not None:
            packing = Packing(CODE_DTYPES[stored], StorageConfig(), fp8=stored == "fp8")
        rotation = self.model.key_rotation() if packing else None
        how = {"dtype": dtype, "record": record, "packing": packing, "rotation": rotation}
        return KVCache(self.model.spec, method, device=self.model._device, **how)

    def draw(self, cache: KVCache, prompts: int | None = None, seed: int = 0) -> Outputs:
        """Generate images or texts of the first prompts, all by default."""
        texts = self.prompts[:prompts]
        made: Outputs = self.model.generate(texts, cache, PromptNoise(seed, range(len(texts))))
        return made


def load(overrides: Sequence[str], prompts: int, device: str, dtype: torch.dtype) -> Generator:
    """Load a model whose blocks compute in a dtype, and so many prompts.

    Args:
        overrides: choices and settings; `model` and `prompts` among them.
        prompts: to load.
        device: of the model.
        dtype: of its blocks.
    """
    values = composed(overrides)
    model = built(values["model"])
    model.compute_dtype = lambda _: dtype
    model.load(device)
    texts = [prompt.text for prompt in built({**values["prompts"], "count": prompts}).load()]
    return Generator(model, overrides, texts)


def compare(found: Outputs, expected: Outputs) -> list[float]:
    """Return of every sample how near it is: PSNR in dB of images (100 if equal), the share of equal leading text."""
    if isinstance(found, Tensor) and isinstance(expected, Tensor):
        return [measure_psnr(one, other) for one, other in zip(found, expected, strict=True)]
    return [measure_agreement(one, other) for one, other in zip(found, expected, strict=True)]


def measure_psnr(found: Tensor, expected: Tensor) -> float:
    """Return the PSNR of an image uint8 [H, W, 3], at most 100 dB."""
    error = (found.double() - expected.double()).square().mean().item()
    return 100.0 if error < 255**2 / 1e10 else float(10 * torch.tensor(255.0**2 / error).log10())


def measure_agreement(found: Text, expected: Text) -> float:
    """Return the share of a text up to the first letter that is another."""
    longest = max(len(found.text), len(expected.text))
    for place in range(longest):
        if found.text[place : place + 1] != expected.text[place : place + 1]:
            return place / longest
    return 1.0


def are_equal(found: Outputs, expected: Outputs) -> bool:
    """Return whether two batches are the same, byte for byte."""
    if isinstance(found, Tensor) and isinstance(expected, Tensor):
        return torch.equal(found, expected)
    return list(found) == list(expected)
