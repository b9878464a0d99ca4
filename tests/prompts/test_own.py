"""Prompts whose outputs under the full cache are read."""

import pytest

from kvbench.core.config import ConfigError
from kvbench.core.reading import OwnOutput
from kvbench.prompts.own import Own
from kvbench.prompts.scenes import Scenes
from kvbench.prompts.texts import Texts


def test_prompts_are_those_of_the_set_and_their_outputs_are_read() -> None:
    scenes = Scenes(count=3)
    prompts = Own(scenes).load()
    assert [prompt.text for prompt in prompts] == [prompt.text for prompt in scenes.load()]
    assert {prompt.reading for prompt in prompts} == {OwnOutput()}
    assert Own(scenes).load_others(2, 0) == scenes.load_others(2, 0)


def test_texts_that_are_read_have_no_output() -> None:
    with pytest.raises(ConfigError, match=r"prompts\.of: these are texts to read"):
        Own(Texts(count=1)).load()
