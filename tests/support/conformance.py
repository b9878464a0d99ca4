"""Shapes, methods and prepared caches of the conformance tests."""

from copy import copy, deepcopy
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from kvbench.core.budget import Budget, InfeasibleBudget
from kvbench.core.segments import ModelSpec, next_scale, next_token
from kvbench.engine.cache import KVCache
from kvbench.engine.coding.formats import Packing
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.calibration import Artifact, Observer
from tests.support.engine import D, prepared
from tests.support.methods import class_of, settings_of
from tests.support.small_models import composed

TINY = ("infinity_tiny", "var_tiny", "llamagen_tiny")
SPECS = ("small", "rows", "tokens", *TINY)
FAMILIES = dict.fromkeys(SPECS, "next-scale") | dict.fromkeys(("tokens", "llamagen_tiny"), "next-token")


@lru_cache
def model(name: str) -> Any:
    return instantiate(composed(f"model={name}").model)


@lru_cache
def spec_of(name: str) -> ModelSpec:
    """The shapes of a model with few channels, or of one between them: few heads, sinks of two segments or of one.

    The segments of `small` are maps; those of `rows` are a prompt and the rows of an image, all tokens of a row at
    once; those of `tokens` are such rows made token by token.
    """
    if name == "small":
        return ModelSpec("small", 4, 3, D, next_scale([(side, side) for side in (1, 2, 3, 4, 5, 6)]))
    if name == "rows":
        return ModelSpec("rows", 3, 2, D, next_scale([(1, 5), *[(1, 8)] * 11]))
    if name == "tokens":
        return ModelSpec("tokens", 3, 2, D, next_token(5, [*[8] * 10, 7]), logit_scale=D**-0.5)
    return replace(model(name).spec, head_dim=D)


def method_of(name: str, spec: str) -> Method:
    """A method as its file describes it, with the sinks of the model; not yet prepared."""
    return copy(described(name, spec))


@lru_cache
def described(name: str, spec: str) -> Method:
    cfg = composed(f"model={spec if spec in TINY else TINY[0]}").copy()
    OmegaConf.set_struct(cfg, False)
    cfg.method = settings_of(name)
    if spec not in TINY:
        cfg.sinks = 2 if spec == "small" else 1
    method = instantiate(cfg.method)
    assert isinstance(method, Method)
    return method


def artifact_for(method: Method, spec: ModelSpec, seed: int = 0) -> Artifact | None:
    """Random numbers where the method wants calibrated ones."""
    observer = method.needs()
    if not isinstance(observer, Observer):
        return None
    generator = torch.Generator().manual_seed(seed)
    shapes = observer.tensor_shapes(spec).items()
    return Artifact(observer.kind, {name: torch.rand(x, generator=generator).double() for name, x in shapes})


def ready(
    name: str, spec: str, budget: float | str, seed: int = 0, packing: Packing | None = None
) -> KVCache:
    """A cache of a prepared method; a budget that is refused is raised to the smallest that the refusal names."""
    method = deepcopy(prepare_once(name, spec, budget, seed))
    return KVCache(spec_of(spec), method, dtype=torch.float32, packing=packing)


@lru_cache(8)
def prepare_once(name: str, spec: str, budget: float | str, seed: int) -> Method:
    """A prepared method, to be copied: some solve a program first."""
    shapes, method = spec_of(spec), method_of(name, spec)
    try:
        method.check(shapes, Budget.parse(budget, shapes))
    except InfeasibleBudget as refusal:
        budget = smallest(refusal)
    return prepared(method, shapes, budget, artifact_for(method, shapes, seed))


def smallest(refusal: InfeasibleBudget) -> str:
    return str(refusal).split("the smallest feasible budget is ")[1].split(",")[0]


def fits(name: str, spec: str) -> bool:
    """Whether a method is for models of this family."""
    return FAMILIES[spec] in class_of(name).families


def home(name: str) -> str:
    """The small shapes that a method is for."""
    return "small" if fits(name, "small") else "tokens"
