"""Models on a GPU that is not there, their networks of real width without numbers."""

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.support.build import built, composed
from kvbench.core.budget import Budget
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.calibration import Observer
from kvbench.models.base import TextFeatures
from kvbench.models.image_model import ImageModel
from kvbench.models.next_token import LinedImageModel
from kvbench.models.parts.decoder import Decoder
from kvbench.models.parts.text_decoder import TextDecoder
from tests.support.fake_device import CUDA

WORDS = (3, 5)


class FakeNoise:
    """Numbers on the CPU, as real ones are."""

    def draw(self, count: int) -> Tensor:
        return torch.empty(len(WORDS), count)


class FakeText:
    """Features on the device."""

    def __init__(self, width: int) -> None:
        self._width = width

    def encode(self, prompts: list[str]) -> TextFeatures:
        return TextFeatures(torch.empty(sum(WORDS), self._width, device=CUDA), WORDS)


def in_half(model: Any) -> None:
    """Parameters in fewer bits, as `load` leaves them: those of the blocks, or all of a next-token model."""
    exact = ("scale_mul_1H11", "ada_gss") if model.name.startswith("var") else ()
    blocks = [model._transformer] if isinstance(model._transformer, Decoder) else model._transformer.layers
    for block in blocks:
        for owner in block.modules():
            for name, parameter in owner.named_parameters(recurse=False):
                dtype = torch.float32 if name in exact else model.compute_dtype(CUDA)
                owner._parameters[name] = nn.Parameter(parameter.to(dtype))


def loaded(name: str, *overrides: str) -> Any:
    """A model of two layers, loaded in fake mode."""
    chosen = [f"model={name}", "model.transformer.depth=2", "model.weights=random", *overrides]
    chosen += ["model.transformer.block_chunks=1"] if name.startswith("infinity") else []
    model = built(composed(chosen)["model"])
    with torch.device(CUDA):
        if name.startswith("qwen3"):
            model._transformer = TextDecoder(model.transformer)
        else:
            transformer, tokenizer = model.networks
            model._transformer, model._tokenizer = transformer(model.transformer), tokenizer(model.tokenizer)
        if name.startswith("infinity"):
            model._text = FakeText(model.transformer.text_width)
        elif not name.startswith("var"):
            model._text = model._read_text(CUDA)[0]
        if isinstance(model, LinedImageModel):
            model._codes = torch.empty(model.transformer.vocabulary, dtype=torch.int64)
    in_half(model)
    model._device = CUDA
    if isinstance(model, ImageModel):
        model._prepare_networks(CUDA)
    else:
        model._transformer.prepare_for(CUDA)
    return model


def prepared(name: str, model: Any, share: float = 0.2) -> Method:
    """A method at a share of the cache, calibrated with random numbers."""
    method: Method = built(composed([f"method={name}", f"model={model.name}"])["method"])
    needs = method.needs()
    artifact = needs.make_stand_in(model.spec) if isinstance(needs, Observer) else None
    method.prepare(model.spec, Budget.parse(1 if name == "full" else share, model.spec), artifact)
    return method
