"""Models on a GPU that is not there, their networks of real width and two layers without numbers."""

from typing import Any

import torch

from benchmarks.support import fake_gpu
from benchmarks.support.build import build_model, prepare_method
from kvbench.methods.shared.base import Method
from kvbench.models.base import TextFeatures
from tests.support.fake_device import CUDA

WORDS = (3, 5)


class FakeText:
    """Features on the device."""

    def __init__(self, width: int) -> None:
        self._width = width

    def encode(self, prompts: list[str]) -> TextFeatures:
        return TextFeatures(torch.empty(sum(WORDS), self._width, device=CUDA), WORDS)


def loaded(name: str, *overrides: str) -> Any:
    """A model of two layers, loaded in fake mode."""
    chosen = ["model.transformer.depth=2", "model.weights=random", *overrides]
    chosen += ["model.transformer.block_chunks=1"] if name.startswith("infinity") else []
    model = build_model(name, *chosen)
    fake_gpu.load(model)
    if name.startswith("infinity"):
        model._text = FakeText(model.transformer.text_width)
    return model


def prepared(name: str, model: Any, share: float = 0.2) -> Method:
    """A method at a share of the cache, calibrated with random numbers."""
    return prepare_method(model.spec, share, [f"method={name}", f"model={model.name}"])
