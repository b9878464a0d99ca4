"""Prompts of Emu3: the frame around a prompt, its tokens, and the tokens of an image."""

from pathlib import Path

from kvbench.models.emu3.transformer import Emu3Config
from kvbench.models.parts.image_lines import LinedTokens, read_codes
from kvbench.models.parts.tokens import find_token, open_tokenizer

BEGIN, PAD, NEWLINE = "<|extra_203|>", "<|endoftext|>", "<|extra_200|>"
START, IMAGE = "<|image start|>", "<|image token|>"
CODE = r"<\|visual token (\d{6})\|>"
"""Names of image tokens, the last ones of the vocabulary."""


def write_prompt(prompt: str, image: tuple[int, int]) -> str:
    """Return a prompt and the beginning of an image of (rows, columns) codes, with special tokens as text.

    >>> write_prompt("a red cube", (90, 60))
    'a red cube<|image start|>90*60<|image token|>'
    """
    rows, columns = image
    return f"{prompt}{START}{rows}*{columns}{IMAGE}"


def read_tokens(path: Path, config: Emu3Config, suffix: str, negative: str) -> LinedTokens:
    """Read the byte-level tokenizer of a `tokenizer.json`.

    Args:
        path: the file.
        config: shape of the model, for the size of its images and the numbers of its codes.
        suffix: text after every prompt.
        negative: prompt of the unconditional branch.

    Raises:
        ImportError: the `text` extra is not installed.
        ValueError: not a tokenizer, or one with other special tokens or codes than the model's.
    """
    reader = open_tokenizer(path)
    begin, pad, newline, *ends = (find_token(reader, name) for name in (BEGIN, PAD, NEWLINE, START, IMAGE))

    def read(prompt: str) -> list[int]:
        text = reader.encode(write_prompt(prompt, config.image), add_special_tokens=False)
        return [begin, *text.ids]

    empty = read("")
    if [empty[1], empty[-1]] != ends:
        raise ValueError(f"it does not read {START} and {IMAGE} as one token each")
    codes = read_codes(reader.get_vocab(), CODE, int, config.vocabulary - config.codes, config.codes)
    unconditional = read(negative)
    return LinedTokens(pad, lambda prompt: read(prompt + suffix), lambda _: [*unconditional], newline, codes)
