"""Attention of a segment's queries over each row's own cached keys and the whole current segment.

The past and the present are two attentions merged by their log-sum-exp, so neither is ever concatenated with the other.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.kernels.compact import Group


def attention_with_lse(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Unmasked attention and its log-sum-exp.

    Args:
        q: [batch, rows, queries, D].
        k: [batch, rows, keys, D], at least one key.
        v: likewise.
        scale: factor on q k^T.

    Returns:
        Output in q's dtype [batch, rows, queries, D], float32 log-sum-exp [batch, rows, queries].
    """
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, scale=scale)
    if q.is_cuda and q.dtype in (torch.float16, torch.bfloat16):
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, scale=scale)[:2]
        return out, lse
    return attention_reference(q, k, v, scale)


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, scale: float, chunk: int = 1024
) -> tuple[Tensor, Tensor]:
    """The same in plain operations, float32 inside, `chunk` queries at a time."""
    outs, lses = [], []
    for part in q.split(chunk, 2):
        scores = part.float() @ k.float().transpose(-1, -2) * scale
        lse = scores.logsumexp(-1)
        outs.append(((scores - lse[..., None]).exp() @ v.float()).to(q.dtype))
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def ragged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past_keys: Tensor,
    past_values: Tensor,
    groups: Sequence[Group],
    scale: float,
) -> Tensor:
    """Queries over the row's cached slots and every token of the current segment.

    Args:
        q: [batch, rows, queries, D]; with grouped queries the heads of one KV head are folded into `queries`.
        k: current keys [batch, rows, tokens, D].
        v: current values, likewise.
        past_keys: flat storage [batch, slots, D] (see `kernels/compact.py`).
        past_values: likewise.
        groups: rows by cached length.
        scale: factor on q k^T.

    Returns:
        [batch, rows, queries, D] in q's dtype.
    """
    out, lse = attention_with_lse(q, k, v, scale)
    for group in groups:
        keys, values = (dense(storage, group).to(q.dtype) for storage in (past_keys, past_values))
        if group.rows is None:
            past, past_lse = attention_with_lse(q, keys, values, scale)
            return out.lerp_(past, torch.sigmoid(past_lse - lse)[..., None].to(out.dtype))
        past, past_lse = attention_with_lse(q.index_select(1, group.rows), keys, values, scale)
        weight = torch.sigmoid(past_lse - lse.index_select(1, group.rows))[..., None].to(out.dtype)
        out.index_copy_(1, group.rows, torch.lerp(out.index_select(1, group.rows), past, weight))
    return out


def dense(storage: Tensor, group: Group) -> Tensor:
    """A group's slots as a view [batch, rows, length, D] of flat storage [batch, slots, D]."""
    stop = group.start + group.size * group.length
    return storage[:, group.start : stop].unflatten(1, (group.size, group.length))
