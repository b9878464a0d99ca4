"""Attention of a segment's queries over each row's own cached keys and the whole current segment.

On CUDA one kernel reads both where they lie. Elsewhere rows of equal length are put together with the present, one
such group after the other: a fused kernel over the copy costs less there than two attentions and their merger.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from kvbench.kernels.compact import Layout, dense


def attention_with_lse(
    q: Tensor, k: Tensor, v: Tensor, scale: float, tokens: int | None = None
) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp in torch's own operations.

    Args:
        q: [batch, rows, queries, D].
        k: [batch, rows, keys, D], at least one key.
        v: likewise.
        scale: factor on q k^T.
        tokens: the last so many keys are seen causally: query m sees of them the first m % tokens + 1; None: all.

    Returns:
        Output in q's dtype [batch, rows, queries, D], float32 log-sum-exp [batch, rows, queries].
    """
    if q.device.type != "cpu":
        return attention_reference(q, k, v, scale, tokens)
    mask = None
    if tokens is not None:
        seen = seen_by(q.shape[2], k.shape[2], tokens, q.device)
        mask = q.new_zeros(seen.shape).masked_fill_(~seen, -torch.inf)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask, scale=scale)


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, scale: float, tokens: int | None = None, *, chunk: int = 1024
) -> tuple[Tensor, Tensor]:
    """The same in plain operations, float32 inside, `chunk` queries at a time."""
    outs, lses = [], []
    seen = None if tokens is None else seen_by(q.shape[2], k.shape[2], tokens, q.device)
    for start in range(0, q.shape[2], chunk):
        scores = q[:, :, start : start + chunk].float() @ k.float().transpose(-1, -2) * scale
        if seen is not None:
            scores.masked_fill_(~seen[start : start + chunk], -torch.inf)
        lse = scores.logsumexp(-1)
        outs.append(((scores - lse[..., None]).exp() @ v.float()).to(q.dtype))
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def seen_by(queries: int, keys: int, tokens: int, device: torch.device) -> Tensor:
    """Bool [queries, keys]: query m sees all but the last `tokens` keys, and of those the first m % tokens + 1."""
    token = torch.arange(tokens - keys, tokens, device=device)
    return token <= (torch.arange(queries, device=device) % tokens)[:, None]


def ragged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past_keys: Tensor,
    past_values: Tensor,
    layout: Layout,
    scale: float,
    *,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Queries over the row's cached slots and the tokens of the current segment.

    q, k and v may have any strides. On CUDA, D is a multiple of 8 and at most 256.

    Args:
        q: [batch, rows, queries, D]; with grouped queries the heads of one KV head lie behind each other in `queries`:
            query m belongs to token m % tokens.
        k: current keys [batch, rows, tokens, D].
        v: current values, likewise.
        past_keys: flat storage [batch, slots, D] (see `kernels/compact.py`), read in q's dtype.
        past_values: likewise.
        layout: where rows lie in the storage.
        scale: factor on q k^T, positive.
        causal: current tokens are seen by themselves and those after them; else by all.

    Returns:
        Output in q's dtype [batch, rows, queries, D], float32 log-sum-exp [batch, rows, queries].
    """
    if q.is_cuda:
        from kvbench.kernels.ragged_attention_triton import ragged_attention_triton

        return ragged_attention_triton(q, k, v, past_keys, past_values, layout, scale, causal=causal)
    tokens = k.shape[2] if causal else None
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    for rows, keys, values in _groups(k, v, past_keys, past_values, layout):
        if rows is None:
            return attention_with_lse(q, keys, values, scale, tokens)
        part, part_lse = attention_with_lse(q.index_select(1, rows), keys, values, scale, tokens)
        out.index_copy_(1, rows, part)
        lse.index_copy_(1, rows, part_lse)
    return out, lse


def _groups(
    k: Tensor, v: Tensor, past_keys: Tensor, past_values: Tensor, layout: Layout
) -> Iterator[tuple[Tensor | None, Tensor, Tensor]]:
    """Rows of equal length (None: all, in order), their keys and values, past and present."""
    if not layout.total:
        yield None, k, v
        return
    for group in layout.groups:
        parts = []
        for storage, current in ((past_keys, k), (past_values, v)):
            present = current if group.rows is None else current.index_select(1, group.rows)
            parts.append(torch.cat((dense(storage, group).to(current.dtype), present), 2))
        yield group.rows, *parts
    empty = layout.order[sum(group.size for group in layout.groups) :].long()
    if len(empty):
        yield empty, k.index_select(1, empty), v.index_select(1, empty)
