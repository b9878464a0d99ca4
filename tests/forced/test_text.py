"""Tokens of texts that are read, and the schedule that all texts of a run share."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.forced.text import FILL, ForcedSchedule, ForcedText, Part, TokenizedText, plan_schedule


def letters(text: str, first: bool) -> list[int]:
    """One token a letter; 0 begins a text."""
    return [0] * first + [ord(letter) for letter in text]


def lay(reading: ForcedText) -> tuple[str, int, tuple[int, ...]]:
    laid = reading.tokenize(letters)
    return "".join(map(chr, laid.tokens)), laid.given, laid.cuts


HAY = "abcdefghij"
FILLED = (Part("<7>"), Part(HAY, FILL), Part("?"), Part("77"))


@pytest.mark.parametrize(
    ("reading", "expected"),
    [
        (ForcedText((Part("abcdef", 5),), given=3), ("\0abcd", 3, ())),
        (ForcedText((Part("abc"), Part("de"))), ("\0abcde", 4, ())),
        (ForcedText((Part(HAY, 3), *FILLED), context=12, cuts=(3,)), ("\0ab<7>abcde?77", 12, (11,))),
        (ForcedText((Part(HAY, 0), *FILLED), context=6), ("<7>ab?77", 6, ())),
    ],
)
def test_parts_are_cut_and_joined(reading: ForcedText, expected: tuple[str, int, tuple[int, ...]]) -> None:
    assert lay(reading) == expected


@pytest.mark.parametrize(
    ("reading", "known"),
    [
        (ForcedText((Part("abcdef", 5),), given=3), True),
        (ForcedText((Part("abcdef"),), given=3), False),
        (ForcedText((Part("abc", 2), Part("de", 2))), False),
        (ForcedText((Part("abc", 2), Part("de", FILL), Part("fg", 2)), given=3, context=4), False),
        (ForcedText((Part("abc", 2), Part("def", 3)), given=3, cuts=(1,)), False),
    ],
)
def test_a_text_with_given_numbers_of_tokens_needs_no_tokenizer(reading: ForcedText, known: bool) -> None:
    laid = reading.tokenize(letters)
    expected = TokenizedText((0,) * len(laid.tokens), laid.given, laid.cuts)
    assert reading.measure() == (expected if known else None)


@pytest.mark.parametrize(
    ("reading", "message"),
    [
        (ForcedText((Part("abc", 6),), given=3), "a part has 4 tokens, and 6 are needed"),
        (ForcedText((Part("abcdefgh"), Part("ab", FILL), Part("xy")), context=5), "and -4 are needed"),
        (ForcedText((Part("abc"), Part("xy")), context=5), "the context has 4 tokens, not 5"),
        (ForcedText((Part("abc"), Part("x"))), "4 of 5 tokens are given; need 1 or more, and 2 or more"),
    ],
)
def test_texts_with_too_few_tokens_are_refused(reading: ForcedText, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lay(reading)


def lengths(schedule: ForcedSchedule) -> list[int]:
    return [segment.length for segment in schedule.segments]


def text(given: int, after: int, *cuts: int) -> TokenizedText:
    return TokenizedText(tuple(range(given + after)), given, cuts)


def test_schedules_by_hand() -> None:
    """The specification's texts of 772 tokens, of which 516 are given: 4 | 128 | 128 ... and the last is not fed."""
    schedule = plan_schedule([text(516, 256)], 128, chunked=True)
    assert lengths(schedule) == [4, *[128] * 5, 127]
    assert (schedule.given, schedule.length) == (516, 772)
    at_once = plan_schedule([text(40, 9, 30), text(36, 20, 26)], 8, chunked=False)
    assert (lengths(at_once), at_once.given) == ([30, 10, 8, 8, 3], 40)  # up to cuts
    assert lengths(plan_schedule([text(20, 5), text(9, 5)], 8, chunked=True)) == [12, 8, 4]  # with padding
    with pytest.raises(ValueError, match="differ in the tokens from their segments"):
        plan_schedule([text(40, 9, 30), text(36, 20, 25)], 8, chunked=False)


@given(
    st.lists(st.tuples(st.integers(1, 90), st.integers(2, 60)), min_size=1, max_size=4), st.integers(1, 40)
)
def test_every_schedule_covers_all_tokens_but_the_last(sizes: list[tuple[int, int]], chunk: int) -> None:
    texts = [text(*size) for size in sizes]
    schedule = plan_schedule(texts, chunk, chunked=True)
    padding = [schedule.given - one.given for one in texts]
    assert schedule.given in [segment.end for segment in schedule.segments]
    assert schedule.length == max(len(one.tokens) + pad for one, pad in zip(texts, padding, strict=True))
    assert max(padding) < schedule.segments[0].length
    assert all(length <= chunk for length in lengths(schedule)[1:])
    assert all(segment.length > 0 and segment.causal for segment in schedule.segments)
