"""Captions are cleaned as by the official program."""

import json

import pytest

from kvbench.models.llamagen.captions import clean_caption, clean_once
from tests.support.reference_llamagen import GOLDEN

pytest.importorskip("ftfy")
CASES = json.loads((GOLDEN / "captions.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["inp"][:30])
def test_captions_become_the_official_ones(case: dict[str, str]) -> None:
    assert clean_once(case["inp"]) == case["once"]
    assert clean_caption(case["inp"]) == case["out"]


def test_nothing_stays_nothing() -> None:
    for caption in ("", "  ", "<b></b>", "@someone #12"):
        assert clean_caption(caption) == ""
