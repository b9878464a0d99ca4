"""Support of the tests of models: configurations, small random models, full caches, and prepared methods."""

from functools import cache
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

from benchmarks.support.build import prepare_method
from kvbench.cli.config.compose import compose_job, hydra_of_kvbench
from kvbench.core.budget import InfeasibleBudget
from kvbench.core.segments import ModelSpec
from kvbench.engine.cache import KVCache
from kvbench.methods.full import Full
from kvbench.methods.shared.base import Method
from kvbench.models.qwen3.model import Qwen3Model
from kvbench.models.qwen3.sampling import TextSampling
from kvbench.models.qwen3.transformer import Qwen3Config
from tests.support.engine import prepared


def split_numbers(prompt: str) -> list[int]:
    """The tokens of a prompt that lists their numbers."""
    return [int(word) for word in prompt.split()]


def small_writer(max_tokens: int) -> Qwen3Model:
    """A language model with random weights whose texts end at random."""
    shape = Qwen3Config(depth=1, width=16, heads=2, kv_heads=1, head_dim=8, hidden=16, vocabulary=12)
    sampling = TextSampling(1.0, 0, 1.0)
    return Qwen3Model("small", shape, sampling, {}, "random", prompt_tokens=4, max_tokens=max_tokens, chunk=4)


@cache
def composed(*overrides: str) -> DictConfig:
    with hydra_of_kvbench():
        return compose_job(list(overrides))[0]


def shrink(name: str, *more: str, **shape: object) -> tuple[str, ...]:
    """Return overrides that make a next-token model of `conf/model` small, its weights random."""
    usual = {"depth": 2, "width": 32, "heads": 4, "kv_heads": 2, "head_dim": 16, "hidden": 64}
    settings = [f"model.transformer.{key}={value}" for key, value in (usual | shape).items()]
    return (f"model={name}", "model.weights=random", *settings, *more)


SMALL_TOKENIZER = tuple(
    f"model.tokenizer.{setting}" for setting in ("codes=128", "latents=16", "widths=[32,32,64]", "blocks=1")
)
SMALL_QWEN3 = shrink("qwen3_8b", "model.prompt_tokens=8", "model.chunk=8", vocabulary=60)


def configured(*overrides: str) -> Any:
    """A model, without its weights."""
    return instantiate(composed(*overrides).model)


def load(*overrides: str) -> Any:
    """A loaded model."""
    one = configured(*overrides)
    one.load("cpu")
    return one


def full(one: Any) -> KVCache:
    """A model's full cache."""
    return KVCache(one.spec, prepared(Full(), one.spec), dtype=torch.float32)


def ready(name: str, spec: ModelSpec, budget: str, overrides: tuple[str, ...]) -> Method:
    """A method of `conf/method`, prepared with random numbers for what it calibrates; a refused budget is raised."""
    words = [*overrides, f"method={name}"]
    try:
        return prepare_method(spec, budget, words)
    except InfeasibleBudget as refusal:
        minimum = str(refusal).split("the smallest feasible budget is ")[1].split(",")[0]
        return prepare_method(spec, minimum, words)
