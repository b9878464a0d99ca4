"""First tokens of texts that never leave, under every method: held after every segment, within the budget."""

from contextlib import suppress
from copy import deepcopy

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from kvbench.core.budget import InfeasibleBudget
from kvbench.core.segments import ModelSpec
from kvbench.methods.shared.base import Method
from tests.methods.test_prompt_lengths import (
    LENGTHS,
    METHODS,
    OTHER_SETTINGS,
    budget_of,
    generate,
    spec_of,
)
from tests.support.conformance import artifact_for
from tests.support.methods import settings_of
from tests.support.small_models import composed

LEADING = 4
WITHOUT = ("swa",)  # a window without sinks, by its definition
CASES = [name for name in METHODS if name not in WITHOUT]


def describe(name: str) -> Method:
    """The method of a file under `protect.leading=4` without sinks; not prepared."""
    cfg = composed("model=reasoner_tiny").copy()
    OmegaConf.set_struct(cfg, False)
    cfg.method = OmegaConf.merge(settings_of(name), OTHER_SETTINGS.get(name, {}))
    cfg.sinks, cfg.protect.leading = 0, LEADING
    method = instantiate(cfg.method)
    assert isinstance(method, Method)
    return method


def prepare_smallest(method: Method, spec: ModelSpec) -> None:
    """Prepare a method for the smallest of some budgets that it accepts."""
    artifact = artifact_for(deepcopy(method), spec)
    for tokens in (8, 14, 30):
        with suppress(InfeasibleBudget):
            return method.prepare(spec, budget_of(spec, tokens), artifact)
    raise AssertionError("no budget is accepted")


@pytest.mark.parametrize("name", CASES)
def test_the_first_tokens_of_a_text_never_leave(name: str) -> None:
    """The cache checks the budget after every layer."""
    method, spec = describe(name), spec_of(LENGTHS[0])
    prepare_smallest(method, spec)
    for generation in generate(method, spec, range(len(LENGTHS))):
        for heads in generation.kept:
            for held in heads:
                assert held[:LEADING] == list(range(LEADING))


def test_a_budget_below_the_first_tokens_is_refused() -> None:
    spec = spec_of(LENGTHS[0])
    for name in ("h2o", "heatkv", "pricekv", "headkv", "streaming_llm"):
        with pytest.raises(InfeasibleBudget, match="need 4 of"):
            describe(name).check(spec, budget_of(spec, 3))


def test_random_scores_do_not_hold_them_otherwise() -> None:
    """Without the setting first tokens leave, so that the tests above test it."""
    method, spec = describe("random"), spec_of(LENGTHS[0])
    method.leading = 0  # type: ignore[attr-defined]
    torch.manual_seed(0)
    method.prepare(spec, budget_of(spec, 8))
    [generation] = generate(method, spec, range(1))
    assert any(held[:LEADING] != list(range(LEADING)) for heads in generation.kept for held in heads)
