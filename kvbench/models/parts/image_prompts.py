"""Prompts of Janus-Pro, Lumina-mGPT and Emu3: the frame around a prompt, its tokens, and the tokens of an image."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvbench.models.parts.decoder import SPECIAL, LinedImageConfig
from kvbench.models.parts.tokens import FramedTokens, find_token, hash_words, open_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Reader

JANUS = ("<｜begin▁of▁sentence｜>", "<begin_of_image>", "<｜▁pad▁｜>")  # noqa: RUF001
"""Names of Janus-Pro's tokens that begin a text and an image, and that pad."""
CELL = 16
"""Pixels per code along a side of Lumina-mGPT's images."""
BEGIN, IMAGE, SEPARATOR, NEWLINE = "<s>", "<racm3:break>", "<reserved08706>", "<reserved08799>"
LUMINA = {BEGIN: 0, IMAGE: 8197, SEPARATOR: 8710, NEWLINE: 8803}
"""Ids of the special tokens that Lumina-mGPT was trained with; its image tokens begin at id 4."""
DIGITS = str.maketrans("ABCDEFGHIJ", "0123456789")
"""Digits by the letters that spell a code in the names of Lumina-mGPT's image tokens."""
EMU3 = ("<|extra_203|>", "<|endoftext|>", "<|extra_200|>", "<|image start|>", "<|image token|>")
"""Names of Emu3's tokens that begin a text, pad, end a line, and begin an image's size and its codes."""


def write_chat(prompt: str) -> str:
    r"""Return a prompt in Janus-Pro's chat template, with special tokens spelled out.

    >>> write_chat(" a red cube ")
    '<|User|>: a red cube\n\n<|Assistant|>:<begin_of_image>'
    """
    text = prompt.strip()
    question = f"<|User|>: {text}\n\n" if text else "<|User|>:"
    return f"{question}<|Assistant|>:{JANUS[1]}"


def write_request(prompt: str, image: tuple[int, int]) -> str:
    r"""Return Lumina-mGPT's request for an image of (rows, columns) codes; in the text, width precedes height.

    >>> write_request("a red cube", (48, 32))
    'Generate an image of 512x768 according to the following prompt:\na red cube<reserved08706>'
    """
    height, width = (CELL * side for side in image)
    return f"Generate an image of {width}x{height} according to the following prompt:\n{prompt}{SEPARATOR}"


def name_size(codes: int) -> tuple[str, int]:
    """Return name and id of Lumina-mGPT's token for an image side of `codes` codes.

    >>> name_size(48)
    ('<reserved08824>', 8828)
    """
    step = codes * CELL // 32
    return f"<reserved{8800 + step:05d}>", 8804 + step


def write_beginning(prompt: str, image: tuple[int, int]) -> str:
    """Return a prompt and the beginning of Emu3's image of (rows, columns) codes, with special tokens spelled out.

    >>> write_beginning("a red cube", (90, 60))
    'a red cube<|image start|>90*60<|image token|>'
    """
    rows, columns = image
    return f"{prompt}{EMU3[3]}{rows}*{columns}{EMU3[4]}"


def read_janus(path: Path) -> FramedTokens:
    """Read Janus-Pro's byte-level `tokenizer.json`; see `open_tokenizer` and `find_token` for errors."""
    reader = open_tokenizer(path)
    begin, _, pad = (find_token(reader, name) for name in JANUS)
    return FramedTokens(pad, _read_framed(reader, begin, write_chat), partial(blank, pad))


def blank(pad: int, tokens: list[int]) -> list[int]:
    """Return Janus-Pro's unconditional branch: all tokens except the first and the last are the pad token.

    Unlike padding in front, these tokens are attended to, as in the official code.
    """
    return [tokens[0], *[pad] * (len(tokens) - 2), tokens[-1]]


def read_lumina(path: Path, config: LinedImageConfig) -> FramedTokens:
    """Read Lumina-mGPT's byte-level `tokenizer.json`; the unconditional branch has no tokens before the image.

    It raises the errors of `open_tokenizer`, and ValueError if special tokens or codes are not the model's.
    """
    reader = open_tokenizer(path)
    for name, number in (*LUMINA.items(), *map(name_size, config.image)):
        if (token := find_token(reader, name)) != number:
            raise ValueError(f"its token {name} has id {token}, not {number}")
    prefix = [LUMINA[IMAGE], *(name_size(side)[1] for side in config.image)]
    read = _read_framed(reader, LUMINA[BEGIN], partial(write_request, image=config.image), prefix)
    if read("")[-4] != LUMINA[SEPARATOR]:
        raise ValueError(f"{SEPARATOR} is not one token")
    codes = read_codes(
        reader.get_vocab(), "IMGIMG([A-J]+)Z", lambda name: int(name.translate(DIGITS)), 4, config.codes
    )
    return FramedTokens(LUMINA[BEGIN], read, lambda _: [*prefix], LUMINA[NEWLINE], codes)


def read_emu3(path: Path, config: LinedImageConfig, suffix: str, negative: str) -> FramedTokens:
    """Read Emu3's byte-level `tokenizer.json`, whose image tokens are the last ones of the vocabulary.

    `config` gives the size of images and the number of codes. `suffix` follows every prompt, `negative` is the prompt
    of the unconditional branch. It raises the errors of `open_tokenizer`, and ValueError if special tokens or codes are
    not the model's.
    """
    reader = open_tokenizer(path)
    begin, pad, newline, *ends = (find_token(reader, name) for name in EMU3)
    read = _read_framed(reader, begin, partial(write_beginning, image=config.image))
    empty, unconditional = read(""), read(negative)
    if [empty[1], empty[-1]] != ends:
        raise ValueError(f"{EMU3[3]} and {EMU3[4]} are not one token each")
    first = config.vocabulary - config.codes
    codes = read_codes(reader.get_vocab(), r"<\|visual token (\d{6})\|>", int, first, config.codes)
    return FramedTokens(pad, lambda prompt: read(prompt + suffix), lambda _: [*unconditional], newline, codes)


def hash_chat(vocabulary: int) -> FramedTokens:
    """Return a stand-in for Janus-Pro's tokenizer without its file, for a vocabulary of at least 4 tokens."""
    begin, image, pad = range(3)
    return FramedTokens(
        pad, lambda prompt: [begin, *hash_words(prompt.split(), 3, vocabulary), image], partial(blank, pad)
    )


def hash_lines(config: LinedImageConfig, suffix: str = "", negative: str | None = None) -> FramedTokens:
    """Return a stand-in, without a file, for the tokenizer of a model that generates images in lines.

    Args:
        config: shape of the model.
        suffix: text after every prompt.
        negative: prompt of the unconditional branch; None for a branch that begins with the image.
    """
    image, first = [3, 4, 5], SPECIAL + config.codes

    def read(prompt: str) -> list[int]:
        return [0, *hash_words(prompt.split(), first, config.vocabulary), 2, *image]

    unconditional = image if negative is None else read(negative)
    codes = torch.arange(-SPECIAL, config.codes).clamp(min=-1)
    return FramedTokens(0, lambda prompt: read(prompt + suffix), lambda _: [*unconditional], 1, codes)


def _read_framed(
    reader: "Reader", begin: int, write: Callable[[str], str], tail: list[int] | None = None
) -> Callable[[str], list[int]]:
    """Return the function from a prompt to its tokens in its frame, after `begin` and before `tail`."""

    def read(prompt: str) -> list[int]:
        return [begin, *reader.encode(write(prompt), add_special_tokens=False).ids, *(tail or ())]

    return read


def forbid(codes: Tensor, newline: int, line: int) -> Callable[[int], Tensor]:
    """Return a function from an image token's index to the tokens that it cannot be, bool [tokens].

    Args:
        codes: int64 [tokens], the image code of each token, -1 where it is not a code.
        newline: token that ends a line, and only a line.
        line: tokens of a line, its newline included.
    """
    others, words = torch.arange(len(codes), device=codes.device) != newline, codes < 0
    return lambda token: words if (token + 1) % line else others


def read_codes(
    vocabulary: Mapping[str, int], pattern: str, number: Callable[[str], int], first: int, codes: int
) -> Tensor:
    """Return the image code of every token, int64 [first + codes], -1 for other tokens.

    Args:
        vocabulary: ids of tokens by name.
        pattern: regular expression of the names of image tokens, whose group spells the code.
        number: returns the code that a group spells.
        first: id of the first image token.
        codes: number of image codes.

    Raises:
        ValueError: image tokens do not have the `codes` consecutive ids from `first` on, or a code is repeated.
    """
    matches = ((re.fullmatch(pattern, name), token) for name, token in vocabulary.items())
    found = {token: number(match[1]) for match, token in matches if match}
    if sorted(found) != [*range(first, first + codes)] or sorted(found.values()) != [*range(codes)]:
        raise ValueError(f"its image tokens are not {codes} codes from id {first} on")
    return torch.tensor([-1] * first + [found[token] for token in sorted(found)])
