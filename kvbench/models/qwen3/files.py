"""Conversion between Qwen3's files and the modules' names."""

from collections.abc import Mapping

import torch
from torch import Tensor

from kvbench.models.files.checkpoints import State
from kvbench.models.files.llama_files import (
    HEAD,
    PREFIX,
    clean_llama,
    pair_halves,
    pair_neighbours,
    split_llama,
    strip_prefix,
)
from kvbench.models.qwen3.transformer import Qwen3Config


def clean_qwen3(raw: Mapping[str, object], config: Qwen3Config) -> State:
    """Return the language model's state.

    A file with a tied embedding may contain it twice; a different second one stays, so that it is refused.
    """
    state = strip_prefix(raw)
    for name in [name for name in state if name.endswith(("q_norm.weight", "k_norm.weight"))]:
        state[name] = pair_neighbours(state[name], config.head_dim)
    head, embedding = state.get("output.weight"), state.get("embed_tokens.weight")
    if config.tied and head is not None and embedding is not None and torch.equal(head, embedding):
        del state["output.weight"]
    return clean_llama(state, config.head_dim)


def split_qwen3(state: Mapping[str, Tensor], config: Qwen3Config) -> State:
    """Return the state of a `Qwen3` under the names of Qwen3's files; the inverse of `clean_qwen3`."""
    split = split_llama(state, config.heads, config.kv_heads, config.head_dim)
    head = split.pop("output.weight", None)
    named = {PREFIX + name: tensor for name, tensor in split.items()}
    for name in [name for name in named if name.endswith(("q_norm.weight", "k_norm.weight"))]:
        named[name] = pair_halves(named[name], config.head_dim)
    return named if head is None else {**named, HEAD: head}
