"""Prompts of Janus-Pro: the chat around a prompt, its tokens, and those of the unconditional branch."""

from pathlib import Path
from typing import NamedTuple

from kvbench.models.parts.tokens import Tokenizer, find_token, hash_words, open_tokenizer

BEGIN, IMAGE, PAD = "<｜begin▁of▁sentence｜>", "<begin_of_image>", "<｜▁pad▁｜>"  # noqa: RUF001


class Marks(NamedTuple):
    """Numbers of the tokens that begin a text, that end a prompt where an image begins, and that stand for none."""

    begin: int
    image: int
    pad: int


class JanusTokens(Tokenizer):
    """Tokens of a chat.

    The unconditional branch is as long as the prompt: all tokens but the first and the last are the pad token. Unlike
    padding in front they are attended to, as in the official program.
    """

    def __init__(self, marks: Marks) -> None:
        self.marks, self.pad = marks, marks.pad

    def drop_condition(self, tokens: list[int]) -> list[int]:
        """Return the tokens of a prompt's unconditional branch."""
        return [tokens[0], *[self.pad] * (len(tokens) - 2), tokens[-1]]


def chat(prompt: str) -> str:
    r"""Return what the model reads of a prompt, its special tokens spelled out.

    >>> chat(" a red cube ")
    '<|User|>: a red cube\n\n<|Assistant|>:<begin_of_image>'
    """
    text = prompt.strip()
    asked = f"<|User|>: {text}\n\n" if text else "<|User|>:"
    return f"{asked}<|Assistant|>:{IMAGE}"


class JanusTokenizer(JanusTokens):
    """The byte-level tokenizer of a `tokenizer.json`.

    Args:
        path: the file.

    Raises:
        ImportError: the `text` extra is not installed.
        ValueError: not a tokenizer, or one without the model's special tokens.
    """

    def __init__(self, path: Path) -> None:
        self._reader = open_tokenizer(path)
        super().__init__(Marks(*(find_token(self._reader, name) for name in (BEGIN, IMAGE, PAD))))

    def encode(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt, from the one that begins the text to the one that begins the image."""
        return [self.marks.begin, *self._reader.encode(chat(prompt), add_special_tokens=False).ids]


class HashedTokens(JanusTokens):
    """A stand-in for a tokenizer without its file: one token a word, by the word's hash.

    Args:
        vocabulary: tokens there are, at least 4.
    """

    def __init__(self, vocabulary: int) -> None:
        super().__init__(Marks(0, 1, 2))
        self._words = vocabulary - len(self.marks)

    def encode(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt, from the one that begins the text to the one that begins the image."""
        words = (len(self.marks) + word for word in hash_words(prompt.split(), self._words))
        return [self.marks.begin, *words, self.marks.image]
