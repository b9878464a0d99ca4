"""Prompts of Janus-Pro: the chat around a prompt, and tokens of the conditional and unconditional branch."""

from functools import partial
from pathlib import Path

from kvbench.models.parts.tokens import FramedTokens, find_token, hash_words, open_tokenizer

BEGIN, IMAGE, PAD = "<｜begin▁of▁sentence｜>", "<begin_of_image>", "<｜▁pad▁｜>"  # noqa: RUF001


def chat(prompt: str) -> str:
    r"""Return a prompt in the chat template, with special tokens as text.

    >>> chat(" a red cube ")
    '<|User|>: a red cube\n\n<|Assistant|>:<begin_of_image>'
    """
    text = prompt.strip()
    question = f"<|User|>: {text}\n\n" if text else "<|User|>:"
    return f"{question}<|Assistant|>:{IMAGE}"


def read_tokens(path: Path) -> FramedTokens:
    """Read the byte-level tokenizer of a `tokenizer.json`.

    Raises:
        ImportError: the `text` extra is not installed.
        ValueError: not a tokenizer, or one without the model's special tokens.
    """
    reader = open_tokenizer(path)
    begin, _, pad = (find_token(reader, name) for name in (BEGIN, IMAGE, PAD))

    def read(prompt: str) -> list[int]:
        return [begin, *reader.encode(chat(prompt), add_special_tokens=False).ids]

    return FramedTokens(pad, read, partial(blank, pad))


def blank(pad: int, tokens: list[int]) -> list[int]:
    """Return the unconditional branch: all tokens except the first and the last are the pad token.

    Unlike padding in front they are attended to, as in the official program.
    """
    return [tokens[0], *[pad] * (len(tokens) - 2), tokens[-1]]


def hash_tokens(vocabulary: int) -> FramedTokens:
    """Return a stand-in for the tokenizer without its file, for a vocabulary of at least 4 tokens."""
    begin, image, pad = range(3)

    def read(prompt: str) -> list[int]:
        return [begin, *hash_words(prompt.split(), 3, vocabulary), image]

    return FramedTokens(pad, read, partial(blank, pad))
