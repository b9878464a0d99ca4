"""Small image models with random weights: dependence on prompt and noise, and refusals."""

import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.models.noise import PromptNoise
from tests.support import reference_emu3, reference_janus, reference_lumina
from tests.support.marks import slow_except
from tests.support.small_models import SMALL_QWEN3, SMALL_TOKENIZER, configured, full, load, shrink

CAPTIONS = ["a red circle", "two blue rings and a dog", "a blue circle"]
CLASSES = ["3", "7 tench", "4"]


@dataclass(frozen=True)
class Case:
    """A small image model and its prompts: two for a batch and one more, and `alike`, the two in other words."""

    overrides: tuple[str, ...]
    size: tuple[int, int]
    prompts: list[str]
    roomy: bool = False  # whether prompts are tokens
    alike: tuple[str, str] | None = None


_LLAMAGEN = {"heads": 2, "vocabulary": 128, "grid": [5, 6]}
CASES = {
    "janus": Case(reference_janus.SMALL, (20, 24), CAPTIONS, roomy=True),
    "lumina": Case(reference_lumina.SMALL, (24, 24), CAPTIONS, roomy=True),
    "emu3": Case(reference_emu3.SMALL, (20, 24), CAPTIONS, roomy=True),
    "llamagen": Case(
        shrink("llamagen_b", *SMALL_TOKENIZER, **_LLAMAGEN, classes=10), (20, 24), CLASSES, alike=("3 x", "7")
    ),
    "llamagen with captions": Case(
        shrink("llamagen_xl_t2i", *SMALL_TOKENIZER, **_LLAMAGEN, text_width=24, text_tokens=8),
        (20, 24),
        ["a b c d e f g h i j", *CAPTIONS[1:]],
        alike=("a b c d e f g x", CAPTIONS[1]),  # cut
    ),
    "var": Case(("model=var_tiny", "model.weights=random"), (96, 96), CLASSES, alike=("3 x", "7")),
    "infinity": Case(
        ("model=infinity_tiny", "model.weights=random", "model.text=t5", "model.sizes=[[1,1],[2,2],[12,12]]"),
        (96, 96),
        CAPTIONS,
    ),
    "infinity with a vocabulary": Case(
        ("model=infinity_tiny", "model.weights=random", "model.sizes=[[1,1],[2,2],[12,12]]"),
        (96, 96),
        ["a red circle", "a blue square", "a blue circle"],
    ),
}


@pytest.fixture
def tiny(case: str) -> Any:
    return loaded(case)


@cache
def loaded(case: str) -> Any:
    return load(*CASES[case].overrides)


@pytest.mark.parametrize("case", slow_except(("janus", "llamagen", "infinity").__contains__, CASES))
def test_images_depend_on_prompt_and_noise_and_on_nothing_else(case: str, tiny: Any) -> None:
    def draw(prompts: list[str], seed: int = 0, first: int = 0, model: Any = tiny) -> Tensor:
        noise = PromptNoise(seed, range(first, first + len(prompts)))
        return model.generate(prompts, full(model), noise)

    given = CASES[case]
    prompts, other = given.prompts[:2], given.prompts[2]
    tiny.check_prompts(prompts)
    images = draw(prompts)
    assert (images.shape, images.dtype) == ((2, *given.size, 3), torch.uint8)
    assert 20 < images.float().std() < 100
    assert ((images == 0) | (images == 255)).float().mean() < 0.2
    again = replace(tiny, sources={})  # random weights need no files
    again.load("cpu")
    assert again.weights_sha256 == tiny.weights_sha256
    assert torch.equal(draw(prompts, model=again), images)
    if given.alike:
        assert torch.equal(draw(list(given.alike)), images)
    assert not torch.equal(draw([other, prompts[1]])[0], images[0])
    assert not torch.equal(draw(prompts, seed=1)[0], images[0])
    assert (draw(prompts[1:], first=1)[0].int() - images[1].int()).abs().max() <= 1
    if given.roomy:
        roomy = replace(tiny, prompt_tokens=20)
        roomy.load("cpu")
        assert (draw(prompts, model=roomy).int() - images.int()).abs().max() <= 1


def test_an_unconditional_prompt_that_is_too_long_is_refused() -> None:
    words = "one two three four five six seven eight"
    long = configured(*reference_emu3.SMALL, f"model.negative='{words}'")
    needed = "needs 13 tokens, more than model.prompt_tokens=12; set it to 13"
    for ask in (lambda: long.check_prompts(["a red circle"]), lambda: long.load("cpu")):
        with pytest.raises(ValueError, match=rf"^model\.negative='one .* {needed}"):
            ask()
    replace(long, sampling=replace(long.sampling, cfg=1.0)).check_prompts(["a red circle"])


@pytest.mark.parametrize(
    ("overrides", "needed"),
    [(reference_janus.SMALL, 10), (reference_lumina.SMALL, 13), ((*SMALL_QWEN3, "model.prompt_tokens=7"), 8)],
)
def test_prompts_too_long_are_refused_by_name(overrides: tuple[str, ...], needed: int) -> None:
    """Of eight words, one more than fit."""
    prompt = "one two three four five six seven eight"
    told = f"prompt {prompt!r} has {needed} tokens: raise model.prompt_tokens={needed - 1} to {needed}"
    refuses(load(*overrides), prompt, told)


@pytest.mark.parametrize("case", ["llamagen", "var"])
def test_prompts_that_name_no_class_are_refused_by_name(tiny: Any) -> None:
    for prompt in ("", "30", "-2", "3.5", "3x", "a red circle", "²"):
        refuses(tiny, prompt, f"prompt {prompt!r}: {tiny.name} needs a class number from 0 to ")


def refuses(one: Any, prompt: str, message: str) -> None:
    for ask in (one.check_prompts, lambda given: one.generate(given, full(one), PromptNoise(0, range(4)))):
        with pytest.raises(ValueError, match=re.escape(message)):
            ask([prompt])
