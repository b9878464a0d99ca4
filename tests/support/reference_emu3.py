"""Support of the tests of Emu3: a tiny model with weights by formula, its tokenizer, and tensors of transformers."""

from collections.abc import Iterable
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor

from kvbench.models.emu3.files import clean_emu3
from kvbench.models.emu3.tokenizer import Emu3VQ, Emu3VQConfig
from kvbench.models.emu3.transformer import Emu3Config
from kvbench.models.parts.decoder import Decoder
from kvbench.models.parts.tokens import FramedTokens
from tests.support.published import read_meta, read_published, read_tensors
from tests.support.reference_llamagen import filled, formula
from tests.support.small_models import SMALL_TOKENIZER, shrink, split_numbers

meta, published = partial(read_meta, "emu3"), partial(read_published, "emu3")
golden = partial(read_tensors, "emu3", "golden")
SPECIAL = (
    "<|endoftext|>", "<|extra_200|>", "<|extra_201|>", "<|extra_203|>", "<|extra_204|>",
    "<|image start|>", "<|image end|>", "<|image token|>", "<image>",
)  # fmt: skip
"""Special tokens of the tiny model, from number 0 on; a token for each byte follows, and then the image tokens."""
CODES, FIRST = 64, len(SPECIAL) + 256
ORDER = torch.randperm(CODES, generator=torch.Generator().manual_seed(0)).tolist()
"""The code of each image token."""
NUMBERS = {name: number for number, name in enumerate(SPECIAL)} | {
    f"<|visual token {code:06d}|>": FIRST + place for place, code in enumerate(ORDER)
}
IMAGE = (4, 6)
CONFIG = Emu3Config(
    depth=2, width=32, heads=4, kv_heads=2, head_dim=8, hidden=48, vocabulary=FIRST + CODES, image=IMAGE, codes=CODES
)  # fmt: skip
TINY_VQ = Emu3VQConfig(codes=CODES, channels=4, latents=4, widths=(32, 64), blocks=1)
SUFFIX, NEGATIVE = " best quality.", "blurry, 2 hands"
SMALL = shrink(
    "emu3_gen", *SMALL_TOKENIZER, "model.tokenizer.channels=16", "model.prompt_tokens=12", "model.suffix=''",
    "model.negative='low quality'", head_dim=8, vocabulary=250, image=[5, 6], codes=128,
)  # fmt: skip
"""A small model with random weights, as overrides."""


def write_byte_tokenizer(path: Path, special: Iterable[str], words: dict[str, int], first: int) -> Path:
    """Write a `tokenizer.json` without merges: special tokens, words, and one token a byte from number `first` on."""
    import tokenizers

    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = words | {letter: first + i for i, letter in enumerate(letters)}
    built = tokenizers.Tokenizer(tokenizers.models.BPE(words, []))
    built.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = tokenizers.decoders.ByteLevel()
    built.add_special_tokens(
        [tokenizers.AddedToken(name, special=True, normalized=False) for name in special]
    )
    built.save(str(path))
    return path


def write_tokenizer(path: Path) -> Path:
    """Write the tiny model's `tokenizer.json`."""
    return write_byte_tokenizer(path, SPECIAL, NUMBERS, len(SPECIAL))


def make_weight(name: str, shape: tuple[int, ...]) -> Tensor:
    """The tiny model's tensor of a name of transformers, exact in float16."""
    if name.endswith("num_batches_tracked"):
        return torch.tensor(5)
    weight = formula(name, shape)
    return weight.abs() + 0.5 if name.endswith("running_var") else weight


@lru_cache
def official_state() -> dict[str, Tensor]:
    """The tiny model's weights by names of transformers."""
    return {name: make_weight(name, tuple(shape)) for name, (shape, _) in published()["tiny"]["keys"].items()}


def part_of(state: dict[str, Tensor], part: str) -> dict[str, Tensor]:
    """The weights of `transformer` or `tokenizer`."""
    cleaned = clean_emu3(state, CONFIG.head_dim)
    return {k.removeprefix(f"{part}."): v for k, v in cleaned.items() if k.startswith(f"{part}.")}


def language_model() -> Decoder:
    """The tiny language model."""
    return filled(Decoder(CONFIG), part_of(official_state(), "transformer"))


@lru_cache
def tokenizer() -> Emu3VQ:
    """The tiny image tokenizer."""
    return filled(Emu3VQ(TINY_VQ), part_of(official_state(), "tokenizer"))


def read_numbers() -> FramedTokens:
    """A tokenizer of prompts that are token numbers."""
    codes = torch.tensor([-1] * FIRST + ORDER)
    return FramedTokens(
        NUMBERS["<|endoftext|>"], split_numbers, lambda _: meta()["negative"], NUMBERS["<|extra_200|>"], codes
    )


def prompt_of() -> str:
    """The tokens of the runs' prompt, as `read_numbers` reads them."""
    return " ".join(map(str, meta()["prompt"]))
