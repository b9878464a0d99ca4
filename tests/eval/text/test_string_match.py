"""Shares of correct outputs in texts, counted by hand."""

from pathlib import Path

import pytest

from kvbench.eval.text.string_match import (
    StringMatchAll,
    StringMatchAllChange,
    StringMatchPart,
    StringMatchPartChange,
)
from tests.eval.text.test_answers import make
from tests.support.image_sets import only, reason

CASES = [
    # text, correct outputs, share of them, any of them, share under the full cache's text
    ("It was in Oslo, then in BERGEN.", ["oslo", "Bergen", "Bodø", "Moss"], 0.5, 1, 1.0),
    ("41730 or 4173", ["4173", "0 or", "5"], 2 / 3, 1, 1.0),  # a part of a longer number counts
    ("Osl o", ["Oslo"], 0, 0, 1.0),
    ("\x07 red\tblue \n", ["red\nblue"], 1, 1, 1.0),  # control characters are line breaks
    ("", ["a", "b"], 0, 0, 1.0),
    ("<think>Rome</think> Paris", ["Rome"], 1, 1, 1.0),  # thoughts count too
]


def test_shares_are_those_counted_by_hand(tmp_path: Path) -> None:
    meta = [{"outputs": outputs} for _, outputs, *_ in CASES]
    ours = make(tmp_path / "ours", [text for text, *_ in CASES], meta)
    full = make(tmp_path / "full", [" ".join(outputs) for _, outputs, *_ in CASES], meta)
    both = ((StringMatchAll(), StringMatchAllChange(), 2), (StringMatchPart(), StringMatchPartChange(), 3))
    for evaluator, change, column in both:
        expected = [case[column] for case in CASES]
        result = only(evaluator, ours)
        assert result.samples is not None
        assert result.samples[evaluator.name] == pytest.approx(expected)
        assert result.scores[evaluator.name].value == pytest.approx(sum(expected) / len(CASES))
        changed = only(change, ours, full).samples
        assert changed is not None
        assert changed[change.name] == pytest.approx(
            [value - case[4] for value, case in zip(expected, CASES, strict=True)]
        )


@pytest.mark.parametrize("outputs", [[], "Oslo", ["Oslo", ""], [7], {"a": 1}])
def test_outputs_that_are_no_texts_are_refused(outputs: object) -> None:
    with pytest.raises(ValueError, match="`outputs` must be a list of non-empty strings"):
        StringMatchAll().check_meta({"outputs": outputs})


def test_texts_without_outputs_are_skipped(tmp_path: Path) -> None:
    assert "prompts=needles" in reason(StringMatchPart(), "skipped", make(tmp_path / "a", ["a"], [{}]))
