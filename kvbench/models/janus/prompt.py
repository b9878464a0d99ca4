"""Prompts of Janus-Pro: the chat around a prompt, and tokens of the conditional and unconditional branch."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from kvbench.models.parts.tokens import Tokenizer, find_token, hash_words, open_tokenizer

BEGIN, IMAGE, PAD = "<｜begin▁of▁sentence｜>", "<begin_of_image>", "<｜▁pad▁｜>"  # noqa: RUF001


class JanusMarks(NamedTuple):
    """Special tokens: the beginning of a text, the beginning of an image, and padding."""

    begin: int
    image: int
    pad: int


class JanusTokens(Tokenizer):
    """Tokens of a chat.

    The unconditional branch is as long as the prompt: all tokens except the first and the last are the pad token.
    Unlike padding in front they are attended to, as in the official program.

    Args:
        marks: special tokens.
        read: returns the tokens of a prompt, from the beginning of the text to the beginning of the image.
    """

    def __init__(self, marks: JanusMarks, read: Callable[[str], list[int]]) -> None:
        self.marks, self.pad, self._read = marks, marks.pad, read

    def encode(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt."""
        return self._read(prompt)

    def drop_condition(self, tokens: list[int]) -> list[int]:
        """Return the tokens of a prompt's unconditional branch."""
        return [tokens[0], *[self.pad] * (len(tokens) - 2), tokens[-1]]


def chat(prompt: str) -> str:
    r"""Return a prompt in the chat template, with special tokens as text.

    >>> chat(" a red cube ")
    '<|User|>: a red cube\n\n<|Assistant|>:<begin_of_image>'
    """
    text = prompt.strip()
    question = f"<|User|>: {text}\n\n" if text else "<|User|>:"
    return f"{question}<|Assistant|>:{IMAGE}"


def read_tokens(path: Path) -> JanusTokens:
    """Read the byte-level tokenizer of a `tokenizer.json`.

    Raises:
        ImportError: the `text` extra is not installed.
        ValueError: not a tokenizer, or one without the model's special tokens.
    """
    reader = open_tokenizer(path)
    marks = JanusMarks(*(find_token(reader, name) for name in (BEGIN, IMAGE, PAD)))

    def read(prompt: str) -> list[int]:
        return [marks.begin, *reader.encode(chat(prompt), add_special_tokens=False).ids]

    return JanusTokens(marks, read)


def hash_tokens(vocabulary: int) -> JanusTokens:
    """Return a stand-in for the tokenizer without its file, for a vocabulary of at least 4 tokens."""
    marks = JanusMarks(0, 1, 2)

    def read(prompt: str) -> list[int]:
        return [marks.begin, *hash_words(prompt.split(), len(marks), vocabulary), marks.image]

    return JanusTokens(marks, read)
