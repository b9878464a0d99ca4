"""Conversion between files in the LLaMA format of transformers and `kvbench.models.parts.decoder`."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from kvbench.models.files.checkpoints import State

NAMES_BY_FILE = {
    "embed_tokens": "tok_embeddings",
    "self_attn.o_proj": "attention.wo",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attention_norm",
}


PREFIX, HEAD = "model.", "lm_head.weight"


def strip_prefix(raw: Mapping[str, object]) -> State:
    """Return a file's tensors without the prefix `model.`, the head as `output.weight`.

    Other tensors get a name that no module has, so that `kvbench.models.files.parameters.check` refuses them.
    """
    state: State = {}
    for name, tensor in raw.items():
        if isinstance(tensor, Tensor):
            known = "output.weight" if name == HEAD else f"{name} (outside {PREFIX})"
            state[name.removeprefix(PREFIX) if name.startswith(PREFIX) else known] = tensor
    return state


def clean_llama(state: State, head_dim: int) -> State:
    """Return a language model's state under the decoder's names.

    The state has the file's names from `layers.` and `embed_tokens.` on. Files have separate projections and pair
    channel j of a head with j + D/2 (`kvbench.models.parts.rotary`).
    """
    paired = {
        name: pair_neighbours(tensor, head_dim)
        if name.endswith(("q_proj.weight", "k_proj.weight"))
        else tensor
        for name, tensor in state.items()
    }
    return join_projections(paired)


def join_projections(state: Mapping[str, Tensor]) -> State:
    """Return a state under the decoder's names, with one projection of queries, keys and values.

    Projections that cannot be joined stay separate, so that `kvbench.models.files.parameters.check` refuses them by
    name.
    """
    joined = dict(state)
    for name in [name for name in state if ".q_proj." in name and "self_attn" in name]:
        parts = [name.replace("q_proj", f"{part}_proj") for part in "qkv"]
        widths = {joined[part].shape[1:] if part in joined else None for part in parts}
        if len(widths) == 1 and None not in widths and all(joined[part].ndim for part in parts):
            joint = torch.cat([joined.pop(part) for part in parts])
            joined[name.replace("self_attn.q_proj", "attention.wqkv")] = joint
    pattern = re.compile("|".join(map(re.escape, NAMES_BY_FILE)))
    return {
        pattern.sub(lambda match: NAMES_BY_FILE[match[0]], name): tensor for name, tensor in joined.items()
    }


def split_llama(state: Mapping[str, Tensor], heads: int, kv_heads: int, head_dim: int) -> State:
    """Return a decoder's state under the names of files; the inverse of `clean_llama`."""
    split: State = {}
    for name, tensor in state.items():
        if "attention.wqkv." in name:
            parts = tensor.unflatten(0, (-1, head_dim)).split((heads, kv_heads, kv_heads))
            for part, rows in zip("qkv", parts, strict=True):
                flat = rows.flatten(0, 1)
                weight = flat if part == "v" else pair_halves(flat, head_dim)
                split[name.replace("attention.wqkv", f"self_attn.{part}_proj")] = weight
        else:
            split[name] = tensor
    back = {ours: file for file, ours in NAMES_BY_FILE.items()}
    pattern = re.compile("|".join(map(re.escape, back)))
    return {pattern.sub(lambda match: back[match[0]], name): tensor for name, tensor in split.items()}


def pair_neighbours(weight: Tensor, head_dim: int, rotary_dim: int | None = None) -> Tensor:
    """Reorder rows [heads x D, ...] so that a head's channels j and j + R/2 become 2 j and 2 j + 1.

    R is `rotary_dim`, D without it; the channels from R on stay.
    """
    if not weight.ndim or len(weight) % head_dim:
        return weight  # a tensor of a different model, whose shape `check` refuses
    rotary = rotary_dim or head_dim
    rotated, others = weight.unflatten(0, (-1, head_dim)).split((rotary, head_dim - rotary), 1)
    paired = rotated.unflatten(1, (2, rotary // 2)).transpose(1, 2).flatten(1, 2)
    return torch.cat((paired, others), 1).flatten(0, 1)


def pair_halves(weight: Tensor, head_dim: int) -> Tensor:
    """Reorder rows [heads x D, ...] back to halves: the inverse of `pair_neighbours`."""
    return weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
