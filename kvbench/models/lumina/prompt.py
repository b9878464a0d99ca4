"""Prompts of Lumina-mGPT: the request around a prompt, its tokens, and the tokens of an image."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.models.lumina.transformer import SPECIAL, LuminaConfig
from kvbench.models.parts.tokens import Tokenizer, find_token, hash_words, open_tokenizer

CELL = 16
"""Pixels per code and side."""
BEGIN, IMAGE, SEPARATOR, NEWLINE = "<s>", "<racm3:break>", "<reserved08706>", "<reserved08799>"
NUMBERS = {BEGIN: 0, IMAGE: 8197, SEPARATOR: 8710, NEWLINE: 8803}
"""Numbers of the special tokens that the model was trained with."""
FIRST_CODE = 4
DIGITS = str.maketrans("ABCDEFGHIJ", "0123456789")


class LuminaMarks(NamedTuple):
    """Special tokens.

    Attributes:
        begin: begins a text.
        newline: ends a line of an image.
        prefix: begins an image with its start, its rows, its columns.
    """

    begin: int
    newline: int
    prefix: tuple[int, int, int]


class LuminaTokens(Tokenizer):
    """Tokens of a request; the unconditional branch has only the tokens that begin an image.

    Args:
        marks: special tokens.
        codes: int64 [tokens], the image code of each token, -1 where it is no code.
        read: returns the tokens of a prompt, from the beginning of the text to the beginning of the image.
    """

    def __init__(self, marks: LuminaMarks, codes: Tensor, read: Callable[[str], list[int]]) -> None:
        self.marks, self.codes, self.pad, self._read = marks, codes, marks.begin, read

    def encode(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt."""
        return self._read(prompt)

    def drop_condition(self, tokens: list[int]) -> list[int]:
        """Return the tokens of a prompt's unconditional branch."""
        return [*self.marks.prefix]


def write_request(prompt: str, image: tuple[int, int]) -> str:
    r"""Return the request for an image of (rows, columns) codes; in the text, width precedes height.

    >>> write_request("a red cube", (48, 32))
    'Generate an image of 512x768 according to the following prompt:\na red cube<reserved08706>'
    """
    height, width = (CELL * side for side in image)
    return f"Generate an image of {width}x{height} according to the following prompt:\n{prompt}{SEPARATOR}"


def name_size(codes: int) -> tuple[str, int]:
    """Return name and number of the token for an image side of `codes` codes.

    >>> name_size(48)
    ('<reserved08824>', 8828)
    """
    step = codes * CELL // 32
    return f"<reserved{8800 + step:05d}>", 8804 + step


def read_tokens(path: Path, config: LuminaConfig) -> LuminaTokens:
    """Read the byte-level tokenizer of a `tokenizer.json`.

    Args:
        path: the file.
        config: shape of the model, for the size of its images and the number of its codes.

    Raises:
        ImportError: the `text` extra is not installed.
        ValueError: not a tokenizer, or one with other special tokens or codes than the model's.
    """
    reader = open_tokenizer(path)
    for name, number in (*NUMBERS.items(), *map(name_size, config.image)):
        if (token := find_token(reader, name)) != number:
            raise ValueError(f"its token {name} is number {token}, not {number}")
    rows, columns = (name_size(side)[1] for side in config.image)
    marks = LuminaMarks(NUMBERS[BEGIN], NUMBERS[NEWLINE], (NUMBERS[IMAGE], rows, columns))

    def read(prompt: str) -> list[int]:
        text = reader.encode(write_request(prompt, config.image), add_special_tokens=False)
        return [marks.begin, *text.ids, *marks.prefix]

    if read("")[-4] != NUMBERS[SEPARATOR]:
        raise ValueError(f"it does not read {SEPARATOR} as one token")
    return LuminaTokens(marks, _read_codes(reader.get_vocab(), config.codes), read)


def _read_codes(vocabulary: dict[str, int], codes: int) -> Tensor:
    """Return the code of every token, int64 [tokens], -1 where it is none; names spell it with letters for digits."""
    numbers = {}
    for name, number in vocabulary.items():
        if spelled := re.fullmatch(r"IMGIMG([A-J]+)Z", name):
            numbers[number] = int(spelled[1].translate(DIGITS))
    if sorted(numbers) != [*range(FIRST_CODE, FIRST_CODE + codes)] or sorted(numbers.values()) != [
        *range(codes)
    ]:
        raise ValueError(f"its image tokens are not {codes} codes from number {FIRST_CODE} on")
    return torch.tensor([-1] * FIRST_CODE + [numbers[number] for number in sorted(numbers)])


def hash_tokens(config: LuminaConfig) -> LuminaTokens:
    """Return a stand-in for the tokenizer without its file."""
    marks, separator, first = LuminaMarks(0, 1, (3, 4, 5)), 2, SPECIAL + config.codes

    def read(prompt: str) -> list[int]:
        words = hash_words(prompt.split(), first, config.vocabulary)
        return [marks.begin, *words, separator, *marks.prefix]

    return LuminaTokens(marks, torch.arange(-SPECIAL, config.codes).clamp(min=-1), read)
