"""Attention that each cached key receives, without keeping the attention matrix."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.kernels.compact import Group
from kvbench.kernels.ragged_attention import dense


def attention_scores(
    q: Tensor, k: Tensor, past_keys: Tensor, groups: Sequence[Group], longest: int, scale: float
) -> Tensor:
    """Logits of every slot, before the softmax.

    Args:
        q: [batch, rows, queries, D].
        k: current keys [batch, rows, tokens, D].
        past_keys: flat storage [batch, slots, D].
        groups: rows by cached length.
        longest: slots of the longest row; shorter ones are -inf beyond their end.
        scale: factor on q k^T.

    Returns:
        float32 [batch, rows, queries, longest + tokens].
    """
    q = q.float() * scale
    current = q @ k.float().transpose(-1, -2)
    if not longest:
        return current
    if groups[0].rows is None:
        return torch.cat((q @ dense(past_keys, groups[0]).float().transpose(-1, -2), current), -1)
    past = q.new_full((*q.shape[:3], longest), -torch.inf)
    for group in groups:
        keys = dense(past_keys, group).float()
        past[:, group.rows, :, : group.length] = q[:, group.rows] @ keys.transpose(-1, -2)
    return torch.cat((past, current), -1)


def attention_mass(
    q: Tensor,
    k: Tensor,
    past_keys: Tensor,
    groups: Sequence[Group],
    longest: int,
    scale: float,
    *,
    power: int = 1,
    chunk: int = 256,
) -> Tensor:
    """Mean over the queries of the attention probability of every slot, or of its powers.

    Args:
        q: [batch, rows, queries, D].
        k: current keys [batch, rows, tokens, D].
        past_keys: flat storage [batch, slots, D].
        groups: rows by cached length.
        longest: slots of the longest row; shorter ones are zero beyond their end.
        scale: factor on q k^T.
        power: 2 for the mean square, from which a variance follows.
        chunk: queries at a time; peak memory is batch x rows x chunk x keys float32.

    Returns:
        float32 [batch, rows, longest + tokens]; with power 1 each row sums to 1.
    """
    batch, rows, queries, _ = q.shape
    mass = q.new_zeros(batch, rows, longest + k.shape[2], dtype=torch.float32)
    for piece in q.split(chunk, 2):
        probabilities = attention_scores(piece, k, past_keys, groups, longest, scale).softmax(-1)
        mass += (probabilities if power == 1 else probabilities.pow_(power)).sum(2)
    return mass.div_(queries)
