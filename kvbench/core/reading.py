"""Texts that are read with forced tokens: their parts, and where scoring begins."""

from dataclasses import dataclass

FILL = -1
"""Number of tokens of a part that fills its context."""


@dataclass(frozen=True)
class Part:
    """A part of a text that is read.

    Attributes:
        text: its characters.
        tokens: number of its first tokens that are read; None for all; `FILL` for as many as the context leaves.
    """

    text: str
    tokens: int | None = None


@dataclass(frozen=True)
class ForcedText:
    """A text that is read under a method and not generated.

    Attributes:
        parts: parts of the text, which are encoded one by one.
        given: number of tokens before the first scored one; None for all parts but the last.
        context: number of tokens of all parts but the last, one of which may fill it; None for what the parts have.
        cuts: indices of parts that begin a new segment, such as a question that follows a compressed context.
        chunked: whether given tokens are compressed after every `model.chunk` tokens; otherwise at their end and at
            `cuts`.
    """

    parts: tuple[Part, ...]
    given: int | None = None
    context: int | None = None
    cuts: tuple[int, ...] = ()
    chunked: bool = True


@dataclass(frozen=True)
class OwnOutput:
    """The full cache's own output for a prompt, which its run draws and other runs read."""
