"""Support of the tests of Janus-Pro: the official tensors and weights, prompts given as tokens."""

from functools import lru_cache, partial

import torch
from safetensors.torch import load_file
from torch import Tensor

from kvbench.models.janus.files import clean_janus
from kvbench.models.janus.transformer import Janus, JanusConfig
from kvbench.models.llamagen.tokenizer import VQ, VQConfig
from kvbench.models.parts.image_prompts import blank
from kvbench.models.parts.tokens import FramedTokens
from tests.support.places import GOLDENS
from tests.support.published import read_meta, read_tensors
from tests.support.reference_llamagen import filled
from tests.support.small_models import SMALL_TOKENIZER, shrink, split_numbers

meta = partial(read_meta, "janus")
golden = partial(read_tensors, "janus")
_SHAPE = {"depth": 3, "width": 64, "heads": 4, "head_dim": 16, "hidden": 96, "vocabulary": 96, "eps": 1e-6}
CONFIGS = {
    kind: JanusConfig(**_SHAPE, kv_heads=kv_heads, image=(4, 4), codes=80)
    for kind, kv_heads in (("mha", 4), ("gqa", 2))
}
TINY_VQ = VQConfig(codes=80, channels=8, latents=32, widths=(32, 32, 64))
SMALL = shrink(
    "janus_pro_1b",
    *SMALL_TOKENIZER,
    "model.prompt_tokens=9",
    head_dim=8,
    vocabulary=100,
    image=[5, 6],
    codes=128,
)
"""A small model with random weights, as overrides."""


@lru_cache
def official_state(kind: str) -> dict[str, Tensor]:
    """The weights of a reference model by official names."""
    return load_file(GOLDENS / "janus" / f"{kind}_state.safetensors")


def whole_state() -> dict[str, Tensor]:
    """The weights with the encoder of images that published files have and no image drawn from text needs: zeros."""
    lacking = {
        f"gen_vision_model.{name}": torch.zeros_like(tensor)
        for name, tensor in VQ(TINY_VQ).state_dict().items()
        if name.startswith(("encoder.", "quant_conv."))
    }
    return {**official_state("mha"), **lacking}


def language_model(kind: str) -> Janus:
    """A reference language model."""
    state = clean_janus(official_state(kind), CONFIGS[kind].head_dim)
    own = {k.removeprefix("transformer."): v.float() for k, v in state.items() if "transformer." in k}
    return filled(Janus(CONFIGS[kind]), own)


@lru_cache
def tokenizer() -> VQ:
    """The reference image tokenizer, its encoder zero."""
    state = clean_janus(whole_state(), 16)
    own = {k.removeprefix("tokenizer."): v.float() for k, v in state.items() if k.startswith("tokenizer.")}
    return filled(VQ(TINY_VQ), own)


def read_numbers() -> FramedTokens:
    """A tokenizer of prompts that are token numbers."""
    return FramedTokens(7, split_numbers, partial(blank, 7))


def prompt_of(kind: str, run: str) -> str:
    """The tokens of a run's prompt, as `Numbers` reads them."""
    return " ".join(map(str, golden(kind)[f"{run}.prompt"].tolist()))
