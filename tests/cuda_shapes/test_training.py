"""A training step of each recipe on a GPU that is not there: loss, optimisers and averaged weights.

Networks and batches are those of the recipes. The transformer's inputs are computed before, with data; checkpoints and
the search for codes need numbers and are left out.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.support.build import CONF, built, composed
from kvbench.extras.training import infinity, llamagen, qwen3, var
from kvbench.extras.training import transformer as transformers
from kvbench.extras.training.loop import Recipe
from kvbench.extras.training.optim import Optimizer, update_average
from kvbench.models.infinity.tokenizer import BSQ
from kvbench.models.infinity.transformer import Infinity
from kvbench.models.llamagen.tokenizer import VQ
from kvbench.models.llamagen.transformer import LlamaGen
from kvbench.models.parts.text import VocabularyEncoder
from kvbench.models.parts.text_decoder import TextDecoder
from kvbench.models.var.transformer import VAR
from tests.support.fake_device import CUDA

Case = tuple[nn.Module, Sequence[object]]
IMAGES = torch.zeros(2, 96, 96, 3, dtype=torch.uint8)


@pytest.fixture(autouse=True)
def autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast believes in the device; AdamW's step count is a number."""
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda *_: True)
    monkeypatch.setattr(importlib.import_module("torch.optim.adam"), "_get_value", lambda _: 1.0)


def make(name: str) -> tuple[Any, Any]:
    """A model of `conf/` and the training of the same name, on the device."""
    training = built(yaml.safe_load((CONF / "train" / f"{name}.yaml").read_text()))
    changes = {"device": str(CUDA)} | ({"compiled": False} if hasattr(training, "compiled") else {})
    return built(composed([f"model={name}"])["model"]), replace(training, **changes)


def take_step(
    name: str, model: nn.Module, recipe: Recipe, loss: Callable[[int], Tensor], *_: object
) -> dict[str, Tensor]:
    """What `fit` does in its first step, without asking for the loss."""
    del name
    optimizer = Optimizer(model, recipe.is_hidden, muon=recipe.muon, adamw=recipe.adamw, decay=recipe.decay)
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    value = loss(0)
    assert (value.shape, value.dtype, value.device) == ((), torch.float32, CUDA)
    assert value.requires_grad
    for parameter in model.parameters():  # the way back is torch's own, whose engine asks the driver
        assert parameter.device == CUDA
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(recipe.rate(0))
    update_average(average, model, recipe.average, 0)
    states = {key: x for key, x in optimizer.state().items() if not key.endswith(".step")}
    assert states
    for tensor in (*average.values(), *states.values()):
        assert (tensor.device, tensor.dtype) == (CUDA, torch.float32)
    return average


def infinity_case(model: Any, recipe: Any) -> Case:
    segments, bits = model.spec.segments, model.transformer.token_channels
    side = segments[-1].height
    latents = torch.zeros(4, bits, side, side, dtype=torch.float16)
    corpus = infinity.Corpus(
        latents, torch.ones(4, model.transformer.text_maxlen, dtype=torch.int64), torch.ones(len(segments))
    )
    network = infinity.TextToBits(VocabularyEncoder(model.text_config), Infinity(model.transformer))
    return network, infinity.draw_batch(corpus, segments, recipe, 0)


def var_case(model: Any, recipe: Any) -> Case:
    tokenizer, config = var.make_tokenizer(model.tokenizer, 0), model.transformer
    side = config.sides[-1]
    latents = torch.zeros(4, config.channels, side, side, dtype=torch.float16)
    corpus = var.ClassCorpus(latents, torch.zeros(4, dtype=torch.int64), config.classes)
    return var.ClassToTokens(VAR(config)), var.draw_batch(corpus, tokenizer, config.segments, recipe, 0)


def llamagen_case(model: Any, recipe: Any) -> Case:
    config = model.transformer
    words = torch.ones(4, config.text_tokens, dtype=torch.int64)
    corpus = llamagen.TokenCorpus(torch.zeros(4, config.tokens, dtype=torch.int16), words)
    network = llamagen.CaptionToTokens(VocabularyEncoder(model.text_config), LlamaGen(config))
    return network, llamagen.draw_batch(corpus, recipe, config.vocabulary, 0)


def reasoner_case(model: Any, recipe: Any) -> Case:
    stage = recipe.stages[0]
    rotation = model.transformer.rotations(stage.count_tokens(qwen3.PUZZLES[recipe.puzzle]))
    return qwen3.NextWord(TextDecoder(model.transformer)), qwen3.draw_batch(rotation, recipe, 0)


@pytest.mark.parametrize(
    ("name", "make_case"),
    [
        *(
            pytest.param(name, make_case, marks=pytest.mark.slow)
            for name, make_case in (
                ("infinity_tiny", infinity_case), ("var_tiny", var_case), ("llamagen_tiny", llamagen_case)
            )
        ),
        ("reasoner_tiny", reasoner_case),
    ],
)  # fmt: skip
def test_a_transformer_takes_a_step(
    name: str, make_case: Callable[[Any, Any], Case], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(transformers, "fit", take_step)
    model, training = make(name)
    network, drawn = make_case(model, training.transformer)
    with FakeTensorMode(allow_non_fake_inputs=True):
        training._fit_transformer(network, lambda _: drawn, tmp_path)


@pytest.mark.parametrize(
    ("name", "make_network"),
    [("infinity_tiny", BSQ), ("var_tiny", partial(var.make_tokenizer, seed=0)), ("llamagen_tiny", VQ)],
)
@pytest.mark.slow
def test_a_tokenizer_takes_a_step(name: str, make_network: Callable[[Any], nn.Module]) -> None:
    model, training = make(name)
    network, recipe = make_network(model.tokenizer), training.tokenizer
    sizes = [(segment.height, segment.width) for segment in model.spec.segments]
    with FakeTensorMode(allow_non_fake_inputs=True):
        network = network.to(CUDA)
        take_step(name, network, recipe, recipe.make_loss(network, IMAGES, sizes, compiled=False))
