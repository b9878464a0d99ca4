"""Image models whose prompts are tokens (Janus-Pro, Lumina-mGPT): dependence on prompt and noise, and every method."""

import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from torch import Tensor

from kvbench.models.noise import PromptNoise
from tests.support import reference_janus, reference_lumina
from tests.support.methods import methods_for
from tests.support.small_models import check_images_of_a_method, check_reference_of_a_method, composed, full

PROMPTS = ["a red circle", "two blue rings and a dog"]
METHODS = methods_for("next-token")


@dataclass(frozen=True)
class Case:
    """A small model.

    Attributes:
        overrides: its configuration.
        size: pixels of its images.
        capacity: tokens of its longest prompt, one less than eight words need.
    """

    overrides: tuple[str, ...]
    size: tuple[int, int]
    capacity: int


CASES = {
    "janus": Case(reference_janus.SMALL, (20, 24), 9),
    "lumina": Case(reference_lumina.SMALL, (24, 24), 12),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def load(case: Case) -> Any:
    one = instantiate(composed(*case.overrides).model)
    one.load("cpu")
    return one


@pytest.fixture(scope="module")
def tiny(case: Case) -> Any:
    return load(case)


def test_images_depend_on_prompt_and_noise_and_on_nothing_else(case: Case, tiny: Any) -> None:
    def images(prompts: list[str], seed: int) -> Tensor:
        return tiny.generate(prompts, full(tiny), PromptNoise(seed, range(len(prompts))))

    first = images(PROMPTS, 0)
    assert (first.shape, first.dtype) == ((2, *case.size, 3), torch.uint8)
    again = load(case)
    assert again.weights_sha256 == tiny.weights_sha256
    assert torch.equal(again.generate(PROMPTS, full(again), PromptNoise(0, range(2))), first)
    assert not torch.equal(images(["a blue circle", PROMPTS[1]], 0)[0], first[0])
    assert not torch.equal(images(PROMPTS, 1)[0], first[0])
    alone = tiny.generate(PROMPTS[1:], full(tiny), PromptNoise(0, (1,)))
    assert (alone[0].int() - first[1].int()).abs().max() <= 1
    roomy = replace(tiny, prompt_tokens=20)
    roomy.load("cpu")
    shifted = roomy.generate(PROMPTS, full(roomy), PromptNoise(0, range(2)))
    assert (shifted.int() - first.int()).abs().max() <= 1
    assert 20 < first.float().std() < 100


def test_prompts_too_long_are_refused_by_name(case: Case, tiny: Any) -> None:
    prompt, needed = "one two three four five six seven eight", case.capacity + 1
    message = re.escape(
        f"prompt {prompt!r} has {needed} tokens: set model.prompt_tokens={needed}, which is {case.capacity}"
    )
    with pytest.raises(ValueError, match=message):
        tiny.check_prompts([*PROMPTS, prompt])
    with pytest.raises(ValueError, match=message):
        tiny.generate([prompt], full(tiny), PromptNoise(0, (0,)))


@pytest.mark.parametrize("name", METHODS)
def test_every_method_draws_images(case: Case, tiny: Any, name: str) -> None:
    check_images_of_a_method(name, tiny, case.overrides, PROMPTS, case.size)


@pytest.mark.parametrize("name", METHODS)
def test_with_room_for_everything_every_method_draws_the_reference(case: Case, tiny: Any, name: str) -> None:
    check_reference_of_a_method(name, tiny, case.overrides, PROMPTS)
