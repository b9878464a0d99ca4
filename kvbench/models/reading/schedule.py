"""Tokens of texts that are read, and their common schedule."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from kvbench.core.reading import FILL, ForcedText, Part
from kvbench.core.segments import Segment, next_token


class LaidText(NamedTuple):
    """Tokens of a text that is read.

    Attributes:
        tokens: all tokens.
        given: number of tokens before the first scored one.
        cuts: positions at which a part begins a new segment.
    """

    tokens: tuple[int, ...]
    given: int
    cuts: tuple[int, ...]


@dataclass(frozen=True)
class ForcedSchedule:
    """Common schedule of the texts of a run.

    Short contexts are padded in front, short ends at their end. The last token is not fed back: no segment has it.

    Attributes:
        segments: segments of the tokens that are fed.
        given: number of tokens before the first scored one, padding included.
    """

    segments: tuple[Segment, ...]
    given: int

    @property
    def length(self) -> int:
        """Tokens of the longest text, padding and the last token included."""
        return self.segments[-1].end + 1

    def find_padding(self, texts: Sequence[LaidText]) -> list[int]:
        """Return the number of padding tokens in front of each text."""
        return [self.given - text.given for text in texts]


def lay_text(reading: ForcedText, encode: Callable[[str, bool], list[int]]) -> LaidText:
    """Return the tokens of a text.

    Args:
        reading: the text.
        encode: returns the tokens of a part, from its characters and whether it is the first one.

    Raises:
        ValueError: a part or the context has too few tokens, or nothing is scored.
    """
    rows = [encode(part.text, not number) for number, part in enumerate(reading.parts)]
    room = None if reading.context is None else reading.context - _count_others(reading.parts, rows)
    rows = [_cut(row, part.tokens, room) for row, part in zip(rows, reading.parts, strict=True)]
    starts = [0]
    for row in rows:
        starts.append(starts[-1] + len(row))
    given = starts[-2] if reading.given is None else reading.given
    if reading.context not in (None, starts[-2]):
        raise ValueError(f"its context has {starts[-2]} tokens, not {reading.context}")
    # A single scored token follows from the given ones, before anything is compressed.
    if not 0 < given < starts[-1] - 1:
        raise ValueError(f"{given} tokens are given of {starts[-1]}: at least 2 must follow, and 1 precede")
    cuts = tuple(starts[part] for part in reading.cuts)
    return LaidText(tuple(token for row in rows for token in row), given, cuts)


def measure(reading: ForcedText) -> LaidText | None:
    """Return the layout of a text without its tokens, which are 0; None if a tokenizer decides their number."""
    counts = [part.tokens for part in reading.parts]
    known = [count for count in counts if count is not None and count != FILL]
    if reading.given is None or reading.cuts or len(known) < len(counts):
        return None
    return LaidText((0,) * sum(known), reading.given, ())


def _count_others(parts: Sequence[Part], rows: Sequence[Sequence[int]]) -> int:
    """Return the tokens of a context without the part that fills it."""
    pairs = list(zip(parts, rows, strict=True))[:-1]
    return sum(len(row) if part.tokens is None else part.tokens for part, row in pairs if part.tokens != FILL)


def _cut(row: list[int], tokens: int | None, room: int | None) -> list[int]:
    """Return the first tokens of a part, `room` of a part that fills its context."""
    wanted = room if tokens == FILL else tokens
    if wanted is None:
        return row
    if not 0 <= wanted <= len(row):
        raise ValueError(
            f"a part of it has {len(row)} tokens, and {wanted} are read; lower prompts.length or prompts.context, or "
            "choose longer texts"
        )
    return row[:wanted]


def plan_schedule(texts: Sequence[LaidText], chunk: int, *, chunked: bool) -> ForcedSchedule:
    """Return the schedule of texts.

    Args:
        texts: all texts of a run.
        chunk: number of tokens between two decisions of a method.
        chunked: whether this holds for given tokens too. The first segment then has the rest of the division, so that
            one ends with the given tokens.

    Raises:
        ValueError: parts begin new segments at different places.
    """
    given = max(text.given for text in texts)
    padding = [given - text.given for text in texts]
    places = {tuple(cut + pad for cut in text.cuts) for text, pad in zip(texts, padding, strict=True)}
    if len(places) > 1:
        raise ValueError("prompts: texts differ in the number of tokens between their segments and their end")
    cuts = set(places.pop())
    if chunked:
        cuts |= set(range(given % chunk, given, chunk))
    end = max(len(text.tokens) + pad for text, pad in zip(texts, padding, strict=True)) - 1
    # Padded tokens come in one segment.
    inner = [cut for cut in sorted(cuts) if max(padding) < cut < given]
    bounds = [0, *inner, *range(given, end, chunk), end]
    lengths = [stop - start for start, stop in pairwise(bounds)]
    return ForcedSchedule(next_token(lengths[0], lengths[1:]), given)
