"""Attention of a segment's queries over each row's own cached keys and the whole current segment.

On CUDA one kernel reads both where they lie. Elsewhere rows of equal length are put together with the present, one
such group after the other: dense products over the copy cost less there than two attentions and their merger.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from kvbench.kernels.compact import Layout, dense

PIECE_BYTES = 4 << 20
"""Bytes of scores that exist at a time outside CUDA, so that they stay in the cache."""


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, tokens: int | None = None, lse: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Attention in torch's own operations, float32 inside, piece by piece.

    Args:
        q: [batch, rows, queries, D].
        k: [batch, rows, keys, D], at least one key.
        v: likewise.
        scale: factor on q k^T.
        tokens: the last so many keys are seen causally: query m sees of them the first m % tokens + 1; None: all.
        lse: whether the log-sum-exp is wanted.

    Returns:
        Output in q's dtype [batch, rows, queries, D]; float32 log-sum-exp [batch, rows, queries] or None.
    """
    queries, keys, values = (x.float().flatten(0, 1) for x in (q, k, v))
    pairs, count, _ = queries.shape
    hidden = None if tokens is None else ~seen_by(count, keys.shape[1], tokens, q.device)
    out, sums = torch.empty_like(queries), queries.new_empty(pairs, count)
    rows = max(1, PIECE_BYTES // (4 * count * keys.shape[1]))
    some = count if rows > 1 else max(1, min(count, PIECE_BYTES // (4 * keys.shape[1])))
    buffer = queries.new_empty(min(rows, pairs), some, keys.shape[1])
    for row in range(0, pairs, rows):
        for start in range(0, count, some):
            at = (slice(row, row + rows), slice(start, start + some))
            asked = queries[at]
            scores = buffer[: len(asked), : asked.shape[1]]
            torch.baddbmm(scores, asked, keys[at[0]].mT, beta=0, alpha=scale, out=scores)
            if hidden is not None:
                scores.masked_fill_(hidden[at[1]], -torch.inf)
            if lse:
                torch.logsumexp(scores, -1, out=sums[at])
            torch.softmax(scores, -1, out=scores)
            torch.bmm(scores, values[at[0]], out=out[at])
    return out.view(q.shape).to(q.dtype), sums.view(q.shape[:3]) if lse else None


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
    lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
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
        lse: whether the log-sum-exp is wanted.

    Returns:
        Output in q's dtype [batch, rows, queries, D]; float32 log-sum-exp [batch, rows, queries], or None if it was
        not wanted and not needed.
    """
    if q.is_cuda:
        from kvbench.kernels.ragged_attention_triton import ragged_attention_triton

        return ragged_attention_triton(q, k, v, past_keys, past_values, layout, scale, causal=causal)
    tokens = k.shape[2] if causal else None
    out = torch.empty_like(q)
    sums = q.new_empty(q.shape[:3], dtype=torch.float32) if lse else None
    for rows, keys, values in _groups(k, v, past_keys, past_values, layout):
        if rows is None:
            return dense_attention(q, keys, values, scale, tokens=tokens, lse=lse)
        part, part_sums = dense_attention(
            q.index_select(1, rows), keys, values, scale, tokens=tokens, lse=lse
        )
        out.index_copy_(1, rows, part)
        if sums is not None and part_sums is not None:
            sums.index_copy_(1, rows, part_sums)
    return out, sums


def _groups(
    k: Tensor, v: Tensor, past_keys: Tensor, past_values: Tensor, layout: Layout
) -> Iterator[tuple[Tensor | None, Tensor, Tensor]]:
    """Rows of equal length (None: all, in order), their keys and values, past and present."""
    if not layout.total:
        yield None, k, v
        return
    for group in layout.groups:
        keys, values = (
            torch.cat((dense(storage, group).to(current.dtype), _of(current, group.rows)), 2)
            for storage, current in ((past_keys, k), (past_values, v))
        )
        yield group.rows, keys, values
    empty = layout.order[sum(group.size for group in layout.groups) :].long()
    if len(empty):
        yield empty, _of(k, empty), _of(v, empty)


def _of(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(1, rows)
