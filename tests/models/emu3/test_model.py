"""Emu3's suffix and negative prompt."""

from dataclasses import replace

import pytest

from tests.support.reference_emu3 import SMALL
from tests.support.small_models import configured


def test_an_unconditional_prompt_that_is_too_long_is_refused() -> None:
    long = configured(*SMALL, "model.negative='one two three four five six seven eight'")
    message = (
        r"^model\.negative='one .* has 13 tokens with its frame: set model\.prompt_tokens=13, which is 12"
    )
    for ask in (lambda: long.check_prompts(["a red circle"]), lambda: long.load("cpu")):
        with pytest.raises(ValueError, match=message):
            ask()
    replace(long, sampling=replace(long.sampling, cfg=1.0)).check_prompts(["a red circle"])


def test_the_suffix_is_part_of_every_prompt() -> None:
    one = configured(*SMALL, "model.suffix=' and a dog'")
    whole = configured(*SMALL)
    one.load("cpu")
    whole.load("cpu")
    assert one._text.encode("a red circle") == whole._text.encode("a red circle and a dog")
