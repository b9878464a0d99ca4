"""Prompts of Lumina-mGPT: the request around a prompt, its tokens, and the tokens of an image."""

import re
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.models.lumina.transformer import SPECIAL, LuminaConfig
from kvbench.models.parts.tokens import Tokenizer, find_token, hash_words, open_tokenizer

CELL = 16
"""Pixels of a code's side."""
BEGIN, IMAGE, SEPARATOR, NEWLINE = "<s>", "<racm3:break>", "<reserved08706>", "<reserved08799>"
NUMBERS = {BEGIN: 0, IMAGE: 8197, SEPARATOR: 8710, NEWLINE: 8803}
"""Special tokens that the model was trained with, and their numbers."""
FIRST_CODE = 4
DIGITS = str.maketrans("ABCDEFGHIJ", "0123456789")


class Marks(NamedTuple):
    """Numbers of special tokens.

    Attributes:
        begin: begins a text.
        newline: ends a line of an image.
        prefix: begins an image: its start, its rows, its columns.
    """

    begin: int
    newline: int
    prefix: tuple[int, int, int]


class LuminaTokens(Tokenizer):
    """Tokens of a request. The unconditional branch has only the tokens that begin an image.

    Attributes:
        marks: special tokens.
        codes: int64 [tokens], the image tokenizer's code of each token, -1 where it is no code.
    """

    def __init__(self, marks: Marks, codes: Tensor) -> None:
        self.marks, self.codes, self.pad = marks, codes, marks.begin

    def drop_condition(self, tokens: list[int]) -> list[int]:
        """Return the tokens of a prompt's unconditional branch."""
        return [*self.marks.prefix]


def write_request(prompt: str, image: tuple[int, int]) -> str:
    r"""Return what the model reads of a prompt.

    Args:
        prompt: the text.
        image: rows and columns of codes; width comes before height in the text.

    >>> write_request("a red cube", (48, 32))
    'Generate an image of 512x768 according to the following prompt:\na red cube<reserved08706>'
    """
    height, width = (CELL * side for side in image)
    return f"Generate an image of {width}x{height} according to the following prompt:\n{prompt}{SEPARATOR}"


def name_size(codes: int) -> tuple[str, int]:
    """Return name and number of the token that says of how many codes a side of the image is.

    >>> name_size(48)
    ('<reserved08824>', 8828)
    """
    step = codes * CELL // 32
    return f"<reserved{8800 + step:05d}>", 8804 + step


class LuminaTokenizer(LuminaTokens):
    """The byte-level tokenizer of a `tokenizer.json`.

    Args:
        path: the file.
        config: shape of the model, for the size of its images and the number of its codes.

    Raises:
        ImportError: the `text` extra is not installed.
        ValueError: not a tokenizer, or one whose special tokens or codes are not those of the model.
    """

    def __init__(self, path: Path, config: LuminaConfig) -> None:
        self._reader, self._image = open_tokenizer(path), config.image
        for name, number in (*NUMBERS.items(), *map(name_size, config.image)):
            if (found := find_token(self._reader, name)) != number:
                raise ValueError(f"its token {name} is number {found}, not {number}")
        rows, columns = (name_size(side)[1] for side in config.image)
        marks = Marks(NUMBERS[BEGIN], NUMBERS[NEWLINE], (NUMBERS[IMAGE], rows, columns))
        super().__init__(marks, _read_codes(self._reader.get_vocab(), config.codes))
        if self.encode("")[-4] != NUMBERS[SEPARATOR]:
            raise ValueError(f"it does not read {SEPARATOR} as one token")

    def encode(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt, from the one that begins the text to those that begin the image."""
        text = self._reader.encode(write_request(prompt, self._image), add_special_tokens=False)
        return [self.marks.begin, *text.ids, *self.marks.prefix]


def _read_codes(vocabulary: dict[str, int], codes: int) -> Tensor:
    """Return the code of every token, int64 [tokens], -1 where it is none; names tell it, with letters for digits."""
    found = {}
    for name, number in vocabulary.items():
        if spelled := re.fullmatch(r"IMGIMG([A-J]+)Z", name):
            found[number] = int(spelled[1].translate(DIGITS))
    if sorted(found) != [*range(FIRST_CODE, FIRST_CODE + codes)] or sorted(found.values()) != [*range(codes)]:
        raise ValueError(f"its image tokens are not {codes} codes from number {FIRST_CODE} on")
    return torch.tensor([-1] * FIRST_CODE + [found[number] for number in sorted(found)])


class HashedTokens(LuminaTokens):
    """A stand-in for a tokenizer without its file: one token a word, by the word's hash.

    Args:
        config: shape of the model.
    """

    def __init__(self, config: LuminaConfig) -> None:
        super().__init__(Marks(0, 1, (3, 4, 5)), torch.arange(-SPECIAL, config.codes).clamp(min=-1))
        self._first = SPECIAL + config.codes
        self._words = config.vocabulary - self._first

    def encode(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt, from the one that begins the text to those that begin the image."""
        words = (self._first + word for word in hash_words(prompt.split(), self._words))
        separator = 2
        return [self.marks.begin, *words, separator, *self.marks.prefix]
