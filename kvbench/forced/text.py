"""Texts of forced decoding: parts, tokens, where scoring begins, and the schedule that the texts of a run share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from kvbench.core.segments import Segment, next_token

FILL = -1
"""Value of `Part.tokens` of a part that fills its context."""


class Part(NamedTuple):
    """A part of a text.

    Attributes:
        text: its characters.
        tokens: number of its first tokens that are used; None for all; `FILL` for as many as the context leaves.
    """

    text: str
    tokens: int | None = None


class TokenizedText(NamedTuple):
    """Tokens of a text.

    Attributes:
        tokens: all tokens.
        given: number of tokens before the first scored one.
        cuts: positions at which a part begins a new segment.
    """

    tokens: tuple[int, ...]
    given: int
    cuts: tuple[int, ...]


@dataclass(frozen=True)
class ForcedText:
    """Text whose tokens a model is given under a method, instead of generating them.

    Attributes:
        parts: parts of the text, which are tokenized one by one.
        given: number of tokens before the first scored one; None for those of all parts except the last.
        context: required number of tokens of all parts except the last, one of which may fill it; None for any.
        cuts: indices of parts that begin a new segment, such as a question that follows a compressed context.
        chunked: whether given tokens are compressed after every `model.chunk` tokens; otherwise at their end and at
            `cuts`.
    """

    parts: tuple[Part, ...]
    given: int | None = None
    context: int | None = None
    cuts: tuple[int, ...] = ()
    chunked: bool = True

    def tokenize(self, encode: Callable[[str, bool], list[int]]) -> TokenizedText:
        """Return the tokens of the text.

        Args:
            encode: returns the tokens of a part, given its characters and whether it is the first part.

        Raises:
            ValueError: a part or the context has too few tokens, or nothing is scored.
        """
        rows = [encode(part.text, not index) for index, part in enumerate(self.parts)]
        counts = [
            len(row) if part.tokens is None else part.tokens
            for row, part in zip(rows, self.parts, strict=True)
        ]
        if FILL in counts:
            counts[counts.index(FILL)] = (self.context or 0) - (sum(counts[:-1]) - FILL)
        for row, count in zip(rows, counts, strict=True):
            if not 0 <= count <= len(row):
                raise ValueError(
                    f"a part has {len(row)} tokens, and {count} are needed; lower prompts.length or "
                    "prompts.context, or choose longer texts"
                )
        starts = [0, *accumulate(counts)]
        given = starts[-2] if self.given is None else self.given
        if self.context not in (None, starts[-2]):
            raise ValueError(f"the context has {starts[-2]} tokens, not {self.context}")
        # A single scored token would be predicted from the given ones, before anything is compressed.
        if not 0 < given < starts[-1] - 1:
            raise ValueError(
                f"{given} of {starts[-1]} tokens are given; need 1 or more, and 2 or more after them"
            )
        tokens = (token for row, count in zip(rows, counts, strict=True) for token in row[:count])
        return TokenizedText(tuple(tokens), given, tuple(starts[part] for part in self.cuts))

    def measure(self) -> TokenizedText | None:
        """Return the text with zeros for tokens; None if only a tokenizer can tell their number."""
        known = [part.tokens for part in self.parts if part.tokens not in (None, FILL)]
        if self.given is None or self.cuts or len(known) < len(self.parts):
            return None
        return TokenizedText((0,) * sum(known), self.given, ())


OWN_OUTPUT = ForcedText(())
"""Placeholder of the full cache's output for a prompt, which its run generates and other runs are given."""


@dataclass(frozen=True)
class ForcedSchedule:
    """Common schedule of the texts of a run.

    Short contexts are padded in front, short scored parts at the end. No segment has the last token, which is not fed.

    Attributes:
        segments: segments of the tokens that the model is given.
        given: number of tokens before the first scored one, padding included.
    """

    segments: tuple[Segment, ...]
    given: int

    @property
    def length(self) -> int:
        """Tokens of the longest text, padding and the last token included."""
        return self.segments[-1].end + 1


def plan_schedule(texts: Sequence[TokenizedText], chunk: int, *, chunked: bool) -> ForcedSchedule:
    """Return the schedule of texts.

    Args:
        texts: all texts of a run.
        chunk: number of tokens between two decisions of a method.
        chunked: whether this holds for given tokens too. The first segment then has the remainder, so that a segment
            ends with the given tokens.

    Raises:
        ValueError: `cuts` differ in their distance to the first scored token.
    """
    given = max(text.given for text in texts)
    padding = [given - text.given for text in texts]
    boundaries = {tuple(cut + pad for cut in text.cuts) for text, pad in zip(texts, padding, strict=True)}
    if len(boundaries) > 1:
        raise ValueError("prompts: texts differ in the tokens from their segments to the first scored token")
    cuts = set(boundaries.pop())
    if chunked:
        cuts |= set(range(given % chunk, given, chunk))
    end = max(len(text.tokens) + pad for text, pad in zip(texts, padding, strict=True)) - 1
    # All padding is in the first segment.
    inner = [cut for cut in sorted(cuts) if max(padding) < cut < given]
    bounds = [0, *inner, *range(given, end, chunk), end]
    lengths = [stop - start for start, stop in pairwise(bounds)]
    return ForcedSchedule(next_token(lengths[0], lengths[1:]), given)
