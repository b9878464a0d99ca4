"""Shapes without end, of commands, records and files: each is refused before modules are made."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import nn

from kvbench.cli.config.messages import describe_error
from kvbench.core.segments import MAX_HEADS
from kvbench.models.files.checkpoints import WeightsError
from kvbench.models.files.parameters import MAX_TENSORS, build_on_meta, fill_random
from kvbench.models.llama.config_json import read_shape
from tests.support.small_models import composed

ENDLESS = 10**9
NAMES = sorted(path.stem for path in (Path(__file__).parents[2] / "conf/model").glob("*.yaml"))
OWN_SHAPE = [name for name in NAMES if name not in ("decoder", "smollm2_135m")]
"""Models whose configuration has their shape; others read it from a config.json."""


def make(name: str, key: str, value: object = ENDLESS, **more: object) -> Any:
    settings = composed(f"model={name}").copy()
    for part, one in {**more, key: value}.items():
        OmegaConf.update(settings, f"model.{part}", one, merge=False, force_add=True)
    return instantiate(settings.model)


def test_most_families_have_their_shape_in_the_configuration() -> None:
    assert len(OWN_SHAPE) > 20


@pytest.mark.parametrize("name", OWN_SHAPE)
@pytest.mark.parametrize("key", ["depth", "width", "heads"])
def test_a_size_of_every_family_has_a_bound(name: str, key: str) -> None:
    with pytest.raises(InstantiationException) as caught:
        make(name, f"transformer.{key}")
    assert f"model.transformer.{key}={ENDLESS}: must be at most 16777216" in describe_error(caught.value)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("infinity_tiny", "tokenizer.blocks"),
        ("infinity_tiny", "tokenizer.scales"),
        ("qwen3_8b", "max_tokens"),
    ],
)
def test_other_sizes_have_the_bound(name: str, key: str) -> None:
    with pytest.raises(InstantiationException) as caught:
        make(name, key)
    assert f"model.{key}={ENDLESS}: must be at most 16777216" in describe_error(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("transformer.depth", MAX_HEADS // 6 + 1, "heads of keys and values, at most 131072"),
        ("sizes", [[1, 1], [5000, 5000]], "tokens, at most 16777216"),
    ],
)
def test_heads_and_tokens_have_a_bound(key: str, value: object, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        print(make("infinity_tiny", key, value, **{"tokenizer.mixers": 0}).spec)  # which decodes any grid


@pytest.mark.parametrize("kind", ["llama", "smollm3"])
def test_a_size_in_a_config_json_has_the_bound(kind: str) -> None:
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
    config = {**dict.fromkeys(sizes, 64), "model_type": kind, "num_hidden_layers": ENDLESS}
    with pytest.raises(WeightsError, match=f"num_hidden_layers is {ENDLESS}, but must be at most 16777216"):
        read_shape(config, "config.json")


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("infinity_tiny", "tokenizer.mixers", ENDLESS),
        ("infinity_tiny", "tokenizer.blocks", 2**20),
        ("llamagen_tiny", "tokenizer.blocks", 2**20),
        ("var_tiny", "transformer.depth", 2**20),
        ("qwen3_8b", "transformer.depth", 2**20),
    ],
)
def test_modules_are_bounded_while_they_are_made(name: str, key: str, value: int) -> None:
    with pytest.raises(WeightsError, match=f"more than {MAX_TENSORS} tensors"):
        print(make(name, key, value).parameters)


def test_the_bound_ends_with_the_module() -> None:
    made = [
        build_on_meta(lambda: nn.Sequential(*(nn.Linear(1, 1) for _ in range(MAX_TENSORS // 4))))
        for _ in range(3)
    ]
    assert sum(len(list(one.parameters())) for one in made) > MAX_TENSORS


def test_random_weights_fit_into_the_memory() -> None:
    module = build_on_meta(lambda: nn.Linear(2**21, 2**21, bias=False))
    with pytest.raises(WeightsError, match=r"model\.weights=random: the shape has 4\.4e\+12 parameters"):
        fill_random(module)
    assert next(module.parameters()).device == torch.device("meta")
