"""Support of the tests of VAR: official tensors, the tokenizers of the formula, and the tiny transformers."""

import math
import zlib
from functools import lru_cache, partial

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from kvbench.models.var.tokenizer import VQVAE, VQConfig
from kvbench.models.var.transformer import VAR, VARConfig
from tests.support.places import GOLDENS
from tests.support.published import make_raw_state, read_meta, read_published

GOLDEN = GOLDENS / "var"
meta, published, raw_state = (partial(read, "var") for read in (read_meta, read_published, make_raw_state))
SIDES = (1, 2, 3, 4, 6)
TINY_VQ = VQConfig(codes=128, channels=8, widths=(32, 32, 64))
FULL_VQ = VQConfig(codes=4096, channels=32, widths=(160, 160, 320, 320, 640))
GAINS = {"decoder.conv_out.weight": 0.6, "encoder.conv_out.weight": 1.5}


@lru_cache
def golden(name: str) -> dict[str, Tensor]:
    """Tensors of a reference file, integers as int64 and everything else as float32."""
    tensors = load_file(GOLDEN / f"{name}.safetensors")
    return {key: t.float() if t.is_floating_point() else t.long() for key, t in tensors.items()}


def formula(name: str, shape: tuple[int, ...]) -> Tensor:
    """The reference tokenizers' weight of an official name: normal numbers seeded by the name, exact in float16."""
    layer, kind = name.split(".")[-2:]
    if name == "quantize.embedding.weight":
        mean, spread = 0.0, 1.0
    elif "norm" in layer:
        mean, spread = (1.0, 0.2) if kind == "weight" else (0.0, 0.2)
    elif kind == "bias":
        mean, spread = 0.0, 0.1
    else:
        mean, spread = 0.0, GAINS.get(name, 1.2) / math.sqrt(math.prod(shape[1:]))
    numbers = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    return torch.from_numpy((numbers * spread + mean).astype(np.float16)).float()


def official_name(name: str) -> str:
    """Our name of a tokenizer's tensor without the level that official files lack."""
    parts = name.split(".")
    wrapped = parts[-2] in ("conv", "norm") and parts[-3] != "attn_1"
    wrapped = wrapped and not (parts[-2] == "norm" and parts[-4] == "attn")
    return ".".join([*parts[:-2], parts[-1]]) if wrapped else name


@lru_cache
def tokenizer(config: VQConfig = TINY_VQ) -> VQVAE:
    """A tokenizer with the formula's weights."""
    with torch.device("meta"):
        model = VQVAE(config)
    state = {
        name: formula(official_name(name), tuple(tensor.shape)) for name, tensor in model.state_dict().items()
    }
    model.load_state_dict(state, assign=True)
    return model.eval().requires_grad_(False)


def transformer(kind: str) -> VAR:
    """The tiny transformer `sep` or `shared`."""
    model = VAR(VARConfig(4, 64, 4, SIDES, classes=10, codes=128, channels=8, shared_aln=kind == "shared"))
    model.load_state_dict(golden(f"{kind}.weights"))
    return model.eval().requires_grad_(False)
