"""Attention that each cached key receives, without keeping the attention matrix."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.kernels.compact import Group
from kvbench.kernels.ragged_attention import dense


def attention_mass(
    q: Tensor,
    k: Tensor,
    past_keys: Tensor,
    groups: Sequence[Group],
    longest: int,
    scale: float,
    chunk: int = 256,
) -> Tensor:
    """Mean over the queries of the attention probability of every slot.

    Args:
        q: [batch, rows, queries, D].
        k: current keys [batch, rows, tokens, D].
        past_keys: flat storage [batch, slots, D].
        groups: rows by cached length.
        longest: slots of the longest row; shorter ones are zero beyond their end.
        scale: factor on q k^T.
        chunk: queries at a time; peak memory is batch x rows x chunk x keys float32.

    Returns:
        float32 [batch, rows, longest + tokens], each row summing to 1.
    """
    batch, rows, queries, _ = q.shape
    mass = q.new_zeros(batch, rows, longest + k.shape[2], dtype=torch.float32)
    everyone = torch.arange(rows, device=q.device)
    cached = {id(group): (everyone if group.rows is None else group.rows) for group in groups}
    without = torch.ones(rows, dtype=torch.bool, device=q.device)
    for members in cached.values():
        without[members] = False
    parts = [(cached[id(group)], dense(past_keys, group), group.length) for group in groups]
    if without.any():
        parts.append(
            (without.nonzero().squeeze(1), q.new_empty(batch, int(without.sum()), 0, q.shape[-1]), 0)
        )
    for members, past, length in parts:
        current = k.index_select(1, members).float()
        total = mass.new_zeros(batch, len(members), length + k.shape[2])
        for piece in q.index_select(1, members).split(chunk, 2):
            scores = [piece.float() @ keys.float().transpose(-1, -2) * scale for keys in (past, current)]
            total += torch.cat(scores, -1).softmax(-1).sum(2)
        total /= queries
        mass[:, members, :length] = total[..., :length]
        mass[:, members, longest:] = total[..., length:]
    return mass
