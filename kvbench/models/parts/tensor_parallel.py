"""Tensor parallelism of a decoder: each process has some heads of every layer and some feed-forward channels.

Input projections are split by rows, output projections by columns; the sum of the output projections over all processes
equals one process's result up to the order of summation (Megatron-LM, arXiv:1909.08053, section 3). Every process has
all embeddings, norms and logits.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from kvbench.models.files.checkpoints import State
from kvbench.models.parts.decoder import DecoderConfig

C = TypeVar("C", bound=DecoderConfig)

BY_ROWS = ("feed_forward.w1.weight", "feed_forward.w3.weight")
BY_COLUMNS = ("attention.wo.weight", "feed_forward.w2.weight")


def check_split(config: DecoderConfig, count: int) -> None:
    """Check that a number of processes divides heads and hidden channels.

    Raises:
        ValueError: `count` does not divide a size, which the message names.
    """
    for name in ("heads", "kv_heads", "hidden"):
        if count < 1 or getattr(config, name) % count:
            raise ValueError(
                f"model.tensor_parallel={count}: must divide model.transformer.{name}={getattr(config, name)}"
            )


def split_config(config: C, count: int) -> C:
    """Return the shape of one of `count` equal shares; the residual stream keeps its width."""
    return replace(
        config, heads=config.heads // count, kv_heads=config.kv_heads // count, hidden=config.hidden // count
    )


def split_state(state: Mapping[str, Tensor], config: DecoderConfig, rank: int, count: int) -> State:
    """Return share `rank` of `count` of the state of a decoder with the shape `config`.

    A share has consecutive KV heads and the query heads that use them.
    """
    if count == 1:
        return dict(state)

    def take(tensor: Tensor, dim: int = 0) -> Tensor:
        return tensor.chunk(count, dim)[rank].contiguous()

    def take_share(name: str, tensor: Tensor) -> Tensor:
        if "attention.wqkv." in name:
            heads = tensor.unflatten(0, (-1, config.head_dim))
            parts = heads.split((config.heads, config.kv_heads, config.kv_heads))
            return torch.cat([take(part) for part in parts]).flatten(0, 1)
        each_head = config.qk_norm == "layer" and (".q_norm." in name or ".k_norm." in name)
        if each_head or name.endswith(BY_ROWS):
            return take(tensor)
        return take(tensor, 1) if name.endswith(BY_COLUMNS) else tensor

    return {name: take_share(name, tensor) for name, tensor in state.items()}
