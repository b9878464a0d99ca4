"""Conversion of Lumina-mGPT's and Chameleon's files to the names of the modules."""

from collections.abc import Mapping

from torch import Tensor

from kvbench.models.llama_files import clean_llama, pair_neighbours
from kvbench.models.lumina.transformer import LuminaConfig
from kvbench.models.weights import State, clean_vqgan

PREFIX = "model."
DRAWING = ("decoder.", "post_quant_conv.", "quantize.")


def clean_lumina(raw: Mapping[str, object], config: LuminaConfig) -> State:
    """Return the language model's state.

    Norms of queries and keys have a row for each part of a model that was cut for several GPUs, or one for each head;
    here every head has its own.

    Args:
        raw: contents of a file.
        config: shape of the model.
    """
    given = {name: tensor for name, tensor in raw.items() if isinstance(tensor, Tensor)}
    state = {k.removeprefix(PREFIX): v for k, v in given.items() if k.startswith(PREFIX)}
    state = {
        k: v for k, v in state.items() if not k.startswith("vqmodel.")
    }  # an encoder of images in some copies
    for part, heads in (("q", config.heads), ("k", config.kv_heads)):
        for name in [name for name in state if f".{part}_norm." in name]:
            state[name] = _spread(state[name], heads, config.head_dim)
    if "lm_head.weight" in given:
        state["output.weight"] = given["lm_head.weight"]
    return clean_llama(state, config.head_dim)


def _spread(rows: Tensor, heads: int, head_dim: int) -> Tensor:
    if rows.ndim != 2 or rows.shape[1] != head_dim or heads % len(rows):
        return rows  # of another model: its shape will be refused
    return pair_neighbours(rows.repeat_interleave(heads // len(rows), 0).flatten(), head_dim)


def clean_chameleon(raw: Mapping[str, object]) -> State:
    """Return the state of Chameleon's image tokenizer without what encodes images and what only training needs."""
    return {name: tensor for name, tensor in clean_vqgan(raw).items() if name.startswith(DRAWING)}
