"""Prompts of Lumina-mGPT: the request around a prompt, its tokens, and the tokens of an image."""

from pathlib import Path

from kvbench.models.lumina.transformer import LuminaConfig
from kvbench.models.parts.image_lines import LinedTokens, read_codes
from kvbench.models.parts.tokens import find_token, open_tokenizer

CELL = 16
"""Pixels per code and side."""
BEGIN, IMAGE, SEPARATOR, NEWLINE = "<s>", "<racm3:break>", "<reserved08706>", "<reserved08799>"
NUMBERS = {BEGIN: 0, IMAGE: 8197, SEPARATOR: 8710, NEWLINE: 8803}
"""Numbers of the special tokens that the model was trained with."""
FIRST_CODE, CODE = 4, "IMGIMG([A-J]+)Z"
"""Number of the first image token, and names of image tokens."""
DIGITS = str.maketrans("ABCDEFGHIJ", "0123456789")


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


def read_tokens(path: Path, config: LuminaConfig) -> LinedTokens:
    """Read the byte-level tokenizer of a `tokenizer.json`; the unconditional branch has no tokens before the image.

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
    begin, prefix = NUMBERS[BEGIN], [NUMBERS[IMAGE], *(name_size(side)[1] for side in config.image)]

    def read(prompt: str) -> list[int]:
        text = reader.encode(write_request(prompt, config.image), add_special_tokens=False)
        return [begin, *text.ids, *prefix]

    if read("")[-4] != NUMBERS[SEPARATOR]:
        raise ValueError(f"it does not read {SEPARATOR} as one token")
    codes = read_codes(reader.get_vocab(), CODE, read_letters, FIRST_CODE, config.codes)
    return LinedTokens(begin, read, lambda _: [*prefix], NUMBERS[NEWLINE], codes)


def read_letters(spelled: str) -> int:
    """Return the number that letters from A for 0 to J for 9 spell."""
    return int(spelled.translate(DIGITS))
