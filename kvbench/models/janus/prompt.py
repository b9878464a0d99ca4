"""Prompts of Janus-Pro: the chat they stand in, their tokens, and those of the unconditional branch."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor

from kvbench.core.files import hash_content
from kvbench.models import tokens
from kvbench.models.tokens import encode_prompts, find_token, open_tokenizer, pad_front
from kvbench.models.weights import Source

BEGIN, IMAGE, PAD = "<｜begin▁of▁sentence｜>", "<begin_of_image>", "<｜▁pad▁｜>"  # noqa: RUF001


class Marks(NamedTuple):
    """Numbers of the tokens that begin a text, that end a prompt where an image begins, and that stand for none."""

    begin: int
    image: int
    pad: int


class Tokenizer(Protocol):
    """Anything that turns prompts into token numbers."""

    marks: Marks

    def encode(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt, from the one that begins the text to the one that begins the image."""
        ...


def chat(prompt: str) -> str:
    r"""Return what the model reads of a prompt, its special tokens spelled out.

    >>> chat(" a red cube ")
    '<|User|>: a red cube\n\n<|Assistant|>:<begin_of_image>'
    """
    text = prompt.strip()
    asked = f"<|User|>: {text}\n\n" if text else "<|User|>:"
    return f"{asked}<|Assistant|>:{IMAGE}"


class JanusTokenizer:
    """The byte-level tokenizer of a `tokenizer.json`.

    Args:
        path: the file.

    Raises:
        ImportError: the `text` extra is not installed.
        ValueError: not a tokenizer, or one without the model's special tokens.
    """

    def __init__(self, path: Path) -> None:
        self._reader = open_tokenizer(path)
        self.marks = Marks(*(find_token(self._reader, name) for name in (BEGIN, IMAGE, PAD)))

    def encode(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt, from the one that begins the text to the one that begins the image."""
        return [self.marks.begin, *self._reader.encode(chat(prompt), add_special_tokens=False).ids]


class HashedTokens:
    """A stand-in for a tokenizer without its file: one token a word, by the word's hash.

    Args:
        vocabulary: tokens there are, at least 4.
    """

    marks = Marks(0, 1, 2)

    def __init__(self, vocabulary: int) -> None:
        self._words = vocabulary - len(self.marks)

    def encode(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt, from the one that begins the text to the one that begins the image."""
        words = [int(hash_content(word)[:14], 16) % self._words for word in prompt.split()]
        return [self.marks.begin, *(len(self.marks) + word for word in words), self.marks.image]


def read_tokenizer(source: Source) -> tuple[Tokenizer, str]:
    """Read a `tokenizer.json`, and return it with the SHA-256 of its file.

    Raises:
        WeightsError: the file is missing or not the model's, or the `text` extra is not installed.
    """
    return tokens.read_tokenizer(source, JanusTokenizer, "Janus-Pro")


def lay_out(
    prompts: Sequence[str], tokenizer: Tokenizer, room: int, *, guided: bool
) -> tuple[Tensor, list[int]]:
    """Return the tokens of prompts, padded in front, and how much padding each sequence has.

    The unconditional branch has as many tokens as the prompt, all but the first and the last of which are the pad
    token; unlike those in front they are attended to, as in the official program.

    Args:
        prompts: texts.
        tokenizer: of the model.
        room: tokens of the longest prompt.
        guided: whether there is an unconditional branch, whose sequences come after all others.

    Returns:
        int64 [sequences, room], and the padding of each sequence.

    Raises:
        ValueError: a prompt of more tokens.
    """
    pad = tokenizer.marks.pad
    rows = encode_prompts(prompts, tokenizer, room)
    if guided:
        rows += [[row[0], *[pad] * (len(row) - 2), row[-1]] for row in rows]
    return pad_front(rows, room, pad)
