"""From the names of Qwen3's files to those of the modules."""

from collections.abc import Mapping

import torch
from torch import Tensor

from kvbench.models.llama_files import clean_llama, pair_neighbours
from kvbench.models.qwen3.transformer import Qwen3Config
from kvbench.models.weights import State

PREFIX, HEAD = "model.", "lm_head.weight"


def clean_qwen3(raw: Mapping[str, object], config: Qwen3Config) -> State:
    """Return the language model's state.

    Files of models whose embedding is tied may hold it twice; a second one that differs is kept, to be refused.

    Args:
        raw: contents of the files.
        config: shape of the model.
    """
    given = {name: tensor for name, tensor in raw.items() if isinstance(tensor, Tensor)}
    state = {k.removeprefix(PREFIX): v for k, v in given.items() if k.startswith(PREFIX)}
    for name in [name for name in state if name.endswith(("q_norm.weight", "k_norm.weight"))]:
        state[name] = pair_neighbours(state[name], config.head_dim)
    head, embedding = given.get(HEAD), state.get("embed_tokens.weight")
    again = config.tied and head is not None and embedding is not None and torch.equal(head, embedding)
    if head is not None and not again:
        state["output.weight"] = head
    return clean_llama(state, config.head_dim)
