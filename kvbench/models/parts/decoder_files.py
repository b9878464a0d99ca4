"""Conversion between language models' files, with the names of transformers, and `Decoder`."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from kvbench.models.files.checkpoints import State
from kvbench.models.parts.text_decoder import TextDecoderConfig

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
ROTATED = re.compile(r"[qk]_(proj|norm)\.(weight|bias)$")
"""Ends of the names of tensors whose rows are channels that rotate."""
FREQUENCIES = "rotary_emb.inv_freq"
"""End of the names of computed tensors that older files contain."""


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


def clean_decoder(raw: Mapping[str, object], shape: TextDecoderConfig) -> State:
    """Return a language model's state under the names of `TextDecoder`.

    The tensors have the names of transformers, of the whole model or of some layers. Joint projections of files
    (`qkv_proj`, `gate_up_proj`) are split. A file may contain a tied embedding twice; a head that differs from the
    embedding is kept, so that `kvbench.models.files.parameters.check` refuses it.
    """
    state = {name: value for name, value in strip_prefix(raw).items() if not name.endswith(FREQUENCIES)}
    _split_joint(state, shape)
    head, embedding = state.get("output.weight"), state.get("embed_tokens.weight")
    if shape.tied and head is not None and embedding is not None and torch.equal(head, embedding):
        del state["output.weight"]
    return clean_llama(state, shape.head_dim, shape.rotary_dim)


def _split_joint(state: State, shape: TextDecoderConfig) -> None:
    """Split joint projections in place; projections of another size are kept, so that `check` refuses them."""
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
                state |= {name.replace(both, part): piece for part, piece in split.items()}
                del state[name]


def clean_llama(state: State, head_dim: int, rotary_dim: int | None = None) -> State:
    """Return a language model's state under the decoder's names, with one projection of queries, keys and values.

    The state has the file's names from `layers.` and `embed_tokens.` on. Files rotate channel j of a head together with
    channel j + `rotary_dim` / 2 (`kvbench.models.parts.rotary`). Projections that cannot be joined stay separate, so
    that `kvbench.models.files.parameters.check` refuses them by name.
    """
    joined = {
        name: _interleave_halves(tensor, head_dim, rotary_dim) if ROTATED.search(name) else tensor
        for name, tensor in state.items()
    }
    for name in [name for name in joined if ".q_proj." in name and "self_attn" in name]:
        parts = [name.replace("q_proj", f"{part}_proj") for part in "qkv"]
        widths = {joined[part].shape[1:] if part in joined else None for part in parts}
        if len(widths) == 1 and None not in widths and all(joined[part].ndim for part in parts):
            joint = torch.cat([joined.pop(part) for part in parts])
            joined[name.replace("self_attn.q_proj", "attention.wqkv")] = joint
    return _rename(joined, NAMES_BY_FILE)


def split_decoder(state: Mapping[str, Tensor], shape: TextDecoderConfig) -> State:
    """Invert `clean_decoder` for heads that rotate whole: return a `TextDecoder`'s state under transformers' names."""
    split: State = {}
    for name, tensor in state.items():
        if "attention.wqkv." in name:
            parts = tensor.unflatten(0, (-1, shape.head_dim)).split(
                (shape.heads, shape.kv_heads, shape.kv_heads)
            )
            for part, rows in zip("qkv", parts, strict=True):
                flat = rows.flatten(0, 1)
                weight = flat if part == "v" else _split_even_odd(flat, shape.head_dim)
                split[name.replace("attention.wqkv", f"self_attn.{part}_proj")] = weight
        else:
            split[name] = _split_even_odd(tensor, shape.head_dim) if ROTATED.search(name) else tensor
    named = _rename(split, {ours: file for file, ours in NAMES_BY_FILE.items()})
    return {HEAD if name == "output.weight" else PREFIX + name: tensor for name, tensor in named.items()}


def _rename(state: State, names: Mapping[str, str]) -> State:
    pattern = re.compile("|".join(map(re.escape, names)))
    return {pattern.sub(lambda match: names[match[0]], name): tensor for name, tensor in state.items()}


def _interleave_halves(weight: Tensor, head_dim: int, rotary_dim: int | None = None) -> Tensor:
    """Reorder rows [heads x D, ...] so that a head's channels j and j + R/2 become 2 j and 2 j + 1.

    R is `rotary_dim`, or D if it is None; the channels from R on keep their order.
    """
    if not weight.ndim or not len(weight) or len(weight) % head_dim:
        return weight  # a tensor of a different model, whose shape `check` refuses
    rotary = rotary_dim or head_dim
    rotated, others = weight.unflatten(0, (-1, head_dim)).split((rotary, head_dim - rotary), 1)
    paired = rotated.unflatten(1, (2, rotary // 2)).transpose(1, 2).flatten(1, 2)
    return torch.cat((paired, others), 1).flatten(0, 1)


def _split_even_odd(weight: Tensor, head_dim: int) -> Tensor:
    """Reorder rows [heads x D, ...] back to halves: the inverse of `_interleave_halves` for R = D."""
    return weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
