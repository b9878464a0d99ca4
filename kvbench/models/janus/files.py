"""From the names of Janus-Pro's files to those of the modules."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from kvbench.models.weights import State, clean_vqgan

LANGUAGE = "language_model.model."
VISION = "gen_vision_model."
DRAWING = ("gen_embed.", "gen_aligner.", "gen_head.")
RENAMED = {
    "embed_tokens": "tok_embeddings",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attention_norm",
}


def clean_janus(raw: Mapping[str, object], head_dim: int) -> State:
    """Return the states of language model and image tokenizer, under `transformer` and `tokenizer`.

    What only understands images or writes text is left out. Official files pair channel j of a head with j + D/2, and
    keep its projections apart (`kvbench.models.rotary`).

    Args:
        raw: contents of a file.
        head_dim: channels of a head.
    """
    given = {name: tensor for name, tensor in raw.items() if isinstance(tensor, Tensor)}
    vision = {k.removeprefix(VISION): v for k, v in given.items() if k.startswith(VISION)}
    language = {k.removeprefix(LANGUAGE): v for k, v in given.items() if k.startswith(LANGUAGE)}
    state = {f"tokenizer.{name}": tensor for name, tensor in clean_vqgan(vision).items()}
    state |= {f"transformer.{name}": tensor for name, tensor in _clean_language(language, head_dim).items()}
    return state | {f"transformer.{k}": v for k, v in given.items() if k.startswith(DRAWING)}


def _clean_language(state: State, head_dim: int) -> State:
    for name in [name for name in state if name.endswith("self_attn.q_proj.weight")]:
        parts = [name.replace("q_proj", f"{part}_proj") for part in "qkv"]
        if all(part in state for part in parts):
            q, k, v = (state.pop(part) for part in parts)
            joint = torch.cat((pair_neighbours(q, head_dim), pair_neighbours(k, head_dim), v))
            state[name.replace("self_attn.q_proj", "attention.wqkv")] = joint
    pattern = re.compile("|".join(map(re.escape, RENAMED)))
    return {pattern.sub(lambda found: RENAMED[found[0]], name): tensor for name, tensor in state.items()}


def pair_neighbours(weight: Tensor, head_dim: int) -> Tensor:
    """Reorder a projection's rows [heads x D, width] so that a head's channels j and j + D/2 become 2 j and 2 j + 1."""
    if len(weight) % head_dim:
        return weight  # of another model: its shape will be refused
    return weight.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)
