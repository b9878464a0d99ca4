"""Real text around statements, counted in tokens of the model that reads it."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from kvbench.core.config import ConfigError
from kvbench.forced.text import FILL, ForcedText, Part
from kvbench.prompts.text_files import read_own, read_shipped

MAX_PIECE = 2048
"""Maximum number of consecutive tokens of a text; the texts that ship have at least 2300 of SmolLM2's."""
CHARACTERS_PER_TOKEN = 8
"""Characters of a text kept for each token to read; tokens of prose have fewer than six on average."""
CHARACTERS_PER_STATED_TOKEN = 2
"""Lower bound of the mean characters of a token in statements and questions, which contain digits."""


def read_hay(domain: str, path: str | None, part: str) -> tuple[str, ...]:
    """Return the texts that hay is made of: a domain's `evaluation` or `calibration`, or the user's own.

    Raises:
        ConfigError: an own text is missing, damaged or shorter than a piece may be.
    """
    if path is None:
        return tuple(text for text, _ in read_shipped(domain, part))
    texts = tuple(text for text, _ in read_own(Path(path).expanduser()))
    if short := [number for number, text in enumerate(texts, 1) if len(text) < MAX_PIECE]:
        raise ConfigError(
            f"prompts.path={path}: text {short[0]} has only {len(texts[short[0] - 1])} characters; choose texts "
            f"of at least {MAX_PIECE} tokens"
        )
    return texts


def bound_tokens(*stated: str) -> int:
    """Return a bound on the tokens of statements and questions, whose tokenizer is not known here."""
    return sum(len(text) for text in stated) // CHARACTERS_PER_STATED_TOKEN + 1


def place_statements(
    statements: Sequence[tuple[int, str]],
    question: str,
    answer: str,
    *,
    context: int,
    texts: Iterator[str],
    asked_after: bool,
) -> ForcedText:
    """Return a reading of `context` tokens of hay, statements and a question, and its answer, which is scored.

    Args:
        statements: tokens of hay between each one and the question, and its text; the farthest comes first. The hay
            before it has as many tokens as the others leave.
        question: the end of the context; the answer continues it.
        answer: the last part.
        context: tokens before the answer.
        texts: a text for each piece of hay, of at least `MAX_PIECE` tokens.
        asked_after: whether the context is compressed before the question is read.
    """
    stated = [text for _, text in statements]
    left = context - statements[0][0] - bound_tokens(question, *stated)
    parts = [Part(_cut(next(texts), n), n) for n in _split(max(left - MAX_PIECE // 2, 0))]
    parts.append(Part(_cut(next(texts), MAX_PIECE), FILL))
    ends = [distance for distance, _ in statements[1:]] + [0]
    for (distance, statement), end in zip(statements, ends, strict=True):
        parts.append(Part(statement))
        parts += [Part(_cut(next(texts), n), n) for n in _split(distance - end)]
    parts += [Part(question), Part(answer)]
    cuts = (len(parts) - 2,) if asked_after else ()
    return ForcedText(tuple(parts), None, context, cuts, chunked=False)


def _split(tokens: int) -> list[int]:
    """Return lengths of pieces of at most `MAX_PIECE` tokens, as equal as possible."""
    pieces = -(-tokens // MAX_PIECE)
    return [tokens * (piece + 1) // pieces - tokens * piece // pieces for piece in range(pieces)]


def _cut(text: str, tokens: int) -> str:
    return text[: tokens * CHARACTERS_PER_TOKEN]
