"""Conversion between language models' files, with the names of transformers, and `TextDecoder`."""

from collections.abc import Mapping

import torch
from torch import Tensor

from kvbench.models.files.checkpoints import State
from kvbench.models.files.llama_files import (
    HEAD,
    PREFIX,
    join_projections,
    pair_halves,
    pair_neighbours,
    split_llama,
    strip_prefix,
)
from kvbench.models.parts.text_decoder import TextDecoderConfig

ROTATED = ("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias", "q_norm.weight", "k_norm.weight")
"""Ends of the names of tensors whose rows are channels that rotate."""
FREQUENCIES = "rotary_emb.inv_freq"
"""End of the names of computed tensors that older files contain."""


def clean_decoder(raw: Mapping[str, object], shape: TextDecoderConfig) -> State:
    """Return a language model's state under the names of `TextDecoder`.

    The tensors have the names of transformers, of the whole model or of some layers; files pair channel j of the first
    `rotary_dim` of a head with the one `rotary_dim / 2` later. Joint projections of files (`qkv_proj`, `gate_up_proj`)
    are split. A file with a tied embedding may contain it twice; a different second one stays, so that it is refused.
    """
    state = {name: one for name, one in strip_prefix(raw).items() if not name.endswith(FREQUENCIES)}
    _split_joint(state, shape)
    for name in [name for name in state if name.endswith(ROTATED)]:
        state[name] = pair_neighbours(state[name], shape.head_dim, shape.rotary_dim)
    head, embedding = state.get("output.weight"), state.get("embed_tokens.weight")
    if shape.tied and head is not None and embedding is not None and torch.equal(head, embedding):
        del state["output.weight"]
    return join_projections(state)


def _split_joint(state: State, shape: TextDecoderConfig) -> None:
    """Split joint projections in place; ones of another size stay, so that they are refused."""
    kv = shape.kv_heads * shape.head_dim
    joint = {
        "qkv_proj": {"q_proj": shape.heads * shape.head_dim, "k_proj": kv, "v_proj": kv},
        "gate_up_proj": {"gate_proj": shape.hidden, "up_proj": shape.hidden},
    }
    for both, parts in joint.items():
        for name in [name for name in state if name.endswith(f".{both}.weight")]:
            tensor, rows = state[name], list(parts.values())
            if tensor.ndim and len(tensor) == sum(rows):
                split = dict(zip(parts, tensor.split(rows), strict=True))
                state |= {name.replace(both, part): one for part, one in split.items()}
                del state[name]


def split_decoder(state: Mapping[str, Tensor], shape: TextDecoderConfig) -> State:
    """Return the state of a `TextDecoder` under the names of transformers; the inverse of `clean_decoder`."""
    split = split_llama(state, shape.heads, shape.kv_heads, shape.head_dim)
    head = split.pop("output.weight", None)
    named = {PREFIX + name: tensor for name, tensor in split.items()}
    for name in [name for name in named if name.endswith(("q_norm.weight", "k_norm.weight"))]:
        named[name] = pair_halves(named[name], shape.head_dim)
    return named if head is None else {**named, HEAD: head}
