"""Tokenizers of prompts: their base class, their files, and padded batches of prompts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor

from kvbench.core.files import check_file, hash_content, hash_path
from kvbench.models.files.checkpoints import WeightsError
from kvbench.models.files.weights import Source

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Reader


class Tokenizer(Protocol):
    """Interface of tokenizers of prompts."""

    @property
    def pad(self) -> int:
        """Token that pads short prompts in front."""
        ...

    def encode(self, prompt: str, /) -> list[int]:
        """Return the tokens of a prompt, special ones included."""
        ...


@dataclass(frozen=True)
class FramedTokens:
    """Encoding of prompts in their frame, and tokens of an image.

    Attributes:
        pad: token that pads short prompts in front.
        encode: returns the tokens of a prompt, from the beginning of the text to the beginning of the image.
        drop_condition: returns the tokens of the unconditional branch from the tokens of its prompt.
        newline: token that ends a line of an image, and only a line; None for images without lines.
        codes: int64 [tokens], the image code of each token, -1 where it is not a code; None if no token is one.
    """

    pad: int
    encode: Callable[[str], list[int]]
    drop_condition: Callable[[list[int]], list[int]]
    newline: int | None = None
    codes: Tensor | None = None


T = TypeVar("T")


def hash_words(words: Sequence[str], first: int, vocabulary: int) -> list[int]:
    """Map each word by its hash to a token from `first` to `vocabulary` - 1, in place of a tokenizer's file."""
    return [first + int(hash_content(word)[:14], 16) % (vocabulary - first) for word in words]


def open_tokenizer(path: Path) -> "Reader":
    """Read a `tokenizer.json` with the `tokenizers` library.

    The classes of transformers do not fit: one loses every space of a byte-level file, the other does not begin a text
    with the token that models were trained with.

    Raises:
        ImportError: the `text` extra is not installed.
        ValueError: the file is not a tokenizer.
    """
    from tokenizers import Tokenizer

    try:
        reader = Tokenizer.from_file(str(check_file(path)))
    except Exception as error:  # the library raises nothing more specific
        raise ValueError(str(error)) from None
    # A file may store settings of truncation and padding, which official code resets.
    reader.no_truncation()
    reader.no_padding()
    return reader


def find_token(reader: "Reader", name: str) -> int:
    """Return the id of a token.

    Raises:
        ValueError: no token has the name.
    """
    number: int | None = reader.token_to_id(name)
    if number is None:
        raise ValueError(f"no token {name}")
    return number


def read_tokenizer(source: Source, make: Callable[[Path], T], owner: str) -> tuple[T, str]:
    """Read a model's `tokenizer.json` with `make` and return the tokenizer and the SHA-256 of its file.

    `make` raises a ValueError if the file is not the model's; `owner` is the model's name for the message.

    Raises:
        WeightsError: the file is missing or not the model's, or the `text` extra is not installed.
    """
    path = source.locate()
    try:
        return make(path), hash_path(path)
    except ImportError:
        raise WeightsError(f"{source.key}: install the `text` extra, which reads {path.name}") from None
    except ValueError as error:
        reason = str(error).splitlines()[0]
        raise WeightsError(f"{source.key}: {path} is not {owner}'s tokenizer.json ({reason})") from None


def encode_prompts(prompts: Sequence[str], tokenizer: Tokenizer, capacity: int) -> list[list[int]]:
    """Return the tokens of every prompt.

    Raises:
        ValueError: a prompt has more than `capacity` tokens; names the longest one.
    """
    rows = [tokenizer.encode(prompt) for prompt in prompts]
    longest = max(range(len(rows)), key=lambda index: len(rows[index]), default=None)
    if longest is not None and len(rows[longest]) > capacity:
        needed = len(rows[longest])
        raise ValueError(
            f"prompt {prompts[longest]!r} has {needed} tokens: raise model.prompt_tokens={capacity} to {needed}"
        )
    return rows


def lay_out(
    prompts: Sequence[str], tokenizer: Tokenizer, capacity: int, *, guided: bool = False
) -> tuple[Tensor, list[int]]:
    """Encode prompts and pad them in front: int64 [sequences, capacity], and the padding of each sequence.

    With `guided` the unconditional sequences follow all others.

    Raises:
        ValueError: a prompt has more than `capacity` tokens.
    """
    rows = encode_prompts(prompts, tokenizer, capacity)
    if guided:
        assert isinstance(tokenizer, FramedTokens)
        rows += [tokenizer.drop_condition(row) for row in rows]
    padding = [capacity - len(row) for row in rows]
    padded = [[tokenizer.pad] * count + row for count, row in zip(padding, rows, strict=True)]
    return torch.tensor(padded), padding
