"""Examples in docstrings print what they say."""

import doctest
from types import ModuleType

import pytest

from kvbench.core import budget, segments
from kvbench.eval.text import answers
from kvbench.models.infinity import scales
from kvbench.models.parts import image_prompts
from kvbench.runs.record import folder


@pytest.mark.parametrize(
    "module", [budget, segments, scales, image_prompts, folder, answers], ids=lambda module: module.__name__
)
def test_examples_hold(module: ModuleType) -> None:
    outcome = doctest.testmod(module)
    assert outcome.attempted > 0
    assert outcome.failed == 0
