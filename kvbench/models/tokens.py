"""Prompts as token numbers: tokenizers in files, prompts that must fit, padding in front of them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor

from kvbench.core.files import hash_path
from kvbench.models.weights import Source, WeightsError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Reader


class Encodes(Protocol):
    """Anything that turns prompts into token numbers."""

    def encode(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt, special ones included."""
        ...


T = TypeVar("T", bound=Encodes)


def open_tokenizer(path: Path) -> "Reader":
    """Read a `tokenizer.json`.

    It is read by `tokenizers` itself: of the classes of transformers one loses every space of a byte-level file, and
    the other does not begin a text with the token that models were trained with.

    Raises:
        ImportError: the `text` extra is not installed.
        ValueError: not a tokenizer.
    """
    from tokenizers import Tokenizer

    try:
        reader = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more particular
        raise ValueError(str(error)) from None
    # A file may remember how long its last text was made, which official programs set anew.
    reader.no_truncation()
    reader.no_padding()
    return reader


def find_token(reader: "Reader", name: str) -> int:
    """Return the number of a token.

    Raises:
        ValueError: there is none of that name.
    """
    number: int | None = reader.token_to_id(name)
    if number is None:
        raise ValueError(f"it has no token {name}")
    return number


def read_tokenizer(source: Source, make: Callable[[Path], T], owner: str) -> tuple[T, str]:
    """Read a model's `tokenizer.json`, and return it with the SHA-256 of its file.

    Args:
        source: where the file is.
        make: reads it; a ValueError says why it cannot be the model's.
        owner: name of the model, for the message.

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


def encode_prompts(prompts: Sequence[str], tokenizer: Encodes, room: int) -> list[list[int]]:
    """Return the token numbers of every prompt, each of which must fit.

    Raises:
        ValueError: naming the longest one, and the room that it needs.
    """
    rows = [tokenizer.encode(prompt) for prompt in prompts]
    longest = max(range(len(rows)), key=lambda index: len(rows[index]), default=None)
    if longest is not None and len(rows[longest]) > room:
        needed = len(rows[longest])
        raise ValueError(
            f"prompt {prompts[longest]!r} has {needed} tokens: set model.prompt_tokens={needed}, which is {room}"
        )
    return rows


def pad_front(rows: Sequence[Sequence[int]], room: int, pad: int) -> tuple[Tensor, list[int]]:
    """Return token numbers int64 [rows, room] with `pad` in front, and how much padding each row has."""
    padding = [room - len(row) for row in rows]
    return torch.tensor([[pad] * more + [*row] for more, row in zip(padding, rows, strict=True)]), padding
