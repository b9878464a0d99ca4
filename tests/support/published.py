"""What the official programs' tensors come with: settings of the reference runs, names in the published files."""

import gzip
import json
from functools import lru_cache
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from kvbench.core.segments import ModelSpec, next_scale
from tests.support.places import GOLDENS

SIDES = (1, 2, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64)
INFINITY = {
    name: ModelSpec(f"infinity_{name}", *shape, 128, next_scale([(side, side) for side in SIDES]))
    for name, shape in {"2b": (32, 16), "8b": (40, 28)}.items()
}
"""Infinity's shapes at one megapixel."""


@lru_cache
def read_meta(family: str) -> dict[str, Any]:
    """How the reference tensors of a family of models were made."""
    return json.loads((GOLDENS / family / "meta.json").read_text())


@lru_cache
def read_tensors(family: str, name: str) -> dict[str, Tensor]:
    """Tensors of a reference file, tokens as int64 and float16 as float32."""
    wider = {torch.int16: torch.int64, torch.float16: torch.float32}
    tensors = load_file(GOLDENS / family / f"{name}.safetensors")
    return {key: tensor.to(wider.get(tensor.dtype, tensor.dtype)) for key, tensor in tensors.items()}


@lru_cache
def read_published(family: str) -> dict[str, Any]:
    """Names, shapes and kinds of the published files' tensors, and numbers of parameters."""
    return json.loads(gzip.decompress((GOLDENS / family / "keys.json.gz").read_bytes()))


def make_raw_state(family: str, model: str) -> dict[str, object]:
    """A state dict with the names and shapes of a published file, on the meta device."""
    keys = read_published(family)[model]["keys"]
    return {name: torch.empty(shape, device="meta") for name, (shape, _) in keys.items()}
