"""Attention of a segment's queries over each row's cached keys and the current segment.

`kernels/attention_paths.py` chooses the path. On CUDA one kernel reads past and present in place, or one kernel reads
the present and another kernel or a library the past. Elsewhere rows of equal length are concatenated with the present,
group by group and in pieces: products over a copy that stays in the processor's cache cost less than two attentions and
their merge. Small groups are padded to one length and share a call.
"""

from collections.abc import Iterator, Sequence
from functools import cache

import torch
from torch import Tensor

from kvbench.kernels.attention_choices import AttentionChoice, note_choice
from kvbench.kernels.attention_paths import LIBRARIES, Path, choose_path, describe, explain_path
from kvbench.kernels.batch_invariance import is_batch_invariant
from kvbench.kernels.fused_attention import explain_backend, fused_attention
from kvbench.kernels.layout import Group, Layout, Past, empty_layout, fold_rows, view_group
from kvbench.kernels.past_attention import attend_in_parts
from kvbench.kernels.products import wide_products

PIECE_BYTES = 4 << 20
"""Bytes of scores that exist at once outside CUDA, so that they stay in the processor's cache."""
KEY_MULTIPLE = 16
"""Concatenated keys are padded to a multiple of this: softmax over 399 numbers takes longer than over 400."""
PADDED_SCORES = 1 << 15
"""Padding scores outside CUDA that cost about as much as the calls for one more group."""

DENSE_PRODUCTS = AttentionChoice("dense products", (("fused attention", "needs a GPU"),))
Pair = tuple[Tensor, Tensor]


def ragged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past: Past,
    scale: float,
    *,
    causal: bool = False,
    lse: bool = False,
    path: Path | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Queries over the row's cached slots and the tokens of the current segment.

    q, k and v may have any strides. On CUDA, D is a multiple of 4 and at most 256.

    Args:
        q: [sequences, heads, queries, D], whose heads are the layout's rows, one sequence after the other where each
            has rows of its own; with grouped queries the heads of one KV head follow each other in `queries`:
            query m belongs to token m % tokens.
        k: current keys [sequences, heads, tokens, D].
        v: current values, shaped like `k`.
        past: stored keys and values, read in q's dtype.
        scale: factor on q k^T, positive.
        causal: a query sees current tokens up to its own; otherwise all.
        lse: whether to return the log-sum-exp.
        path: kernels to use; None chooses them on CUDA and uses torch's products elsewhere.
        dtype: dtype of the output, None for q's; float32 if attention over other keys is merged into it later, so that
            it is rounded only once.

    Returns:
        Output [sequences, heads, queries, D]; float32 log-sum-exp [sequences, heads, queries], or None if it was not
        wanted and not needed.
    """
    dtype = dtype or q.dtype
    if path is None:
        shape = describe(q, k, past.layout)
        note_choice(lambda: explain_path(shape, q.device))
        path = choose_path(shape, q.device) if q.is_cuda else "products"
    if path == "kernel":
        from kvbench.kernels.triton.ragged_attention import ragged_attention_triton

        return ragged_attention_triton(q, k, v, past, scale, causal=causal, dtype=dtype)
    if path != "products":
        library = LIBRARIES.get(path)
        return attend_in_parts(q, k, v, past, scale, causal=causal, library=library, dtype=dtype)
    if past.layout.uniform:  # rows of equal length keep the present's order
        stored = _view_past(past, past.layout.groups[0], q.dtype, k.shape[:2])
        out, sums = _attend_parts(q, [*stored, (k, v)], scale, k.shape[2] if causal else None, lse)
        return out.to(dtype), sums
    out, sums = _attend_unequal(q, k, v, past, scale, causal=causal, lse=lse)
    return out.reshape(q.shape).to(dtype), None if sums is None else sums.reshape(q.shape[:3])


def _attend_unequal(
    q: Tensor, k: Tensor, v: Tensor, past: Past, scale: float, *, causal: bool, lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute `ragged_attention` outside CUDA for rows of unequal length; return [batch, rows, queries, D]."""
    tokens, layout = k.shape[2] if causal else None, past.layout
    # Rows in storage order, where equally long rows are adjacent.
    rows = (fold_rows(x, len(past.keys), len(layout.counts)) for x in (q, k, v))
    q, k, v = (x.transpose(0, 1).index_select(0, layout.order) for x in rows)
    states, first = [], 0
    for groups in _join_groups(layout.groups, k.shape[2], q.shape[1] * q.shape[2]):
        at = slice(first, first + sum(group.size for group in groups))
        present = k[at], v[at]
        pasts = [
            [(x.transpose(0, 1), y.transpose(0, 1)) for x, y in _view_past(past, group, q.dtype)]
            for group in groups
        ]
        if len(groups) == 1:
            states.append(_attend_parts(q[at], [*pasts[0], present], scale, tokens, lse))
        else:
            states.append(_padded_attention(q[at], pasts, groups, present, scale, tokens, lse))
        first = at.stop
    # Rows of a token become adjacent, as the next projection reads them.
    out = (
        torch.cat([out for out, _ in states])
        .permute(1, 2, 0, 3)
        .index_select(2, layout.places)
        .transpose(1, 2)
    )
    sums = [sums.transpose(0, 1) for _, sums in states if sums is not None]
    return out, torch.cat(sums, 1).index_select(1, layout.places) if sums else None


def _join_groups(groups: Sequence[Group], tokens: int, scores_per_key: int) -> Iterator[list[Group]]:
    """Yield lists of groups, longest first; groups share a list if padding costs less than another call.

    Args:
        groups: rows by length, longest first.
        tokens: current tokens.
        scores_per_key: scores of a row per key.
    """
    together: list[Group] = []
    rows = 0
    for group in groups:
        longest = together[0].length if together else group.length
        padding = group.size * scores_per_key * (longest - group.length)
        whole = 4 * (rows + group.size) * scores_per_key * _round_up(longest + tokens)
        if together and (padding > PADDED_SCORES or whole > PIECE_BYTES):
            yield together
            together, rows = [], 0
        together.append(group)
        rows += group.size
    yield together


def _round_up(keys: int) -> int:
    return -(-keys // KEY_MULTIPLE) * KEY_MULTIPLE


def _view_past(
    past: Past, group: Group, dtype: torch.dtype, shape: tuple[int, ...] | None = None
) -> list[Pair]:
    """Return keys and values of a group [batch, size, length, D], or of all rows [*shape, length, D]; none if empty."""
    if not group.length:
        return []
    keys, values = (view_group(x, group).to(dtype) for x in past[:2])
    if shape is not None and keys.shape[:2] != shape:
        keys, values = (x.view(*shape, group.length, -1) for x in (keys, values))
    return [(keys, values)]


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, tokens: int | None = None, lse: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Compute attention with torch's operations, in float32 and in pieces; on CUDA with torch's fused attention.

    For 16-bit queries weights are rounded as in fused kernels: before the division by their sum.

    Args:
        q: [batch, rows, queries, D].
        k: [batch, rows, keys, D], at least one key.
        v: values, shaped like k.
        scale: factor on q k^T.
        tokens: number of last keys under a causal mask: query m sees the first m % tokens + 1 of them; None: no mask.
        lse: whether to return the log-sum-exp.

    Returns:
        Output in q's dtype [batch, rows, queries, D]; float32 log-sum-exp [batch, rows, queries] or None.
    """
    whole = q.is_cuda and tokens is None
    note_choice(lambda: explain_backend(q) if whole else DENSE_PRODUCTS)
    if whole and is_batch_invariant():
        from kvbench.kernels.triton.ragged_attention import ragged_attention_triton

        empty = k.new_empty(len(k), 0, k.shape[3])
        past = Past(empty, empty, _make_empty_layout(k.shape[1], k.device))
        return ragged_attention_triton(q, k, v, past, scale)
    if whole:
        return fused_attention(q, k, v, scale)
    return _attend_parts(q, [(k, v)], scale, tokens, lse)


@cache
def _make_empty_layout(rows: int, device: torch.device) -> Layout:
    """Return the layout of empty rows, cached: a CUDA graph must not contain a copy from the host."""
    return empty_layout(rows, device)


def _attend_parts(
    q: Tensor, parts: Sequence[Pair], scale: float, tokens: int | None, lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute `dense_attention` over the concatenated keys and values of all parts."""
    if q.shape[0] == 1 < q.shape[1]:  # pieces are cut along the first dimension
        parts = [(k.transpose(0, 1), v.transpose(0, 1)) for k, v in parts]
        out, sums = _attend_parts(q.transpose(0, 1), parts, scale, tokens, lse)
        return out.transpose(0, 1), None if sums is None else sums.transpose(0, 1)
    out = q.new_empty(q.shape, dtype=torch.float32)
    sums = q.new_empty(q.shape[:3], dtype=torch.float32) if lse else None
    outer, inner, count, channels = q.shape
    keys = sum(k.shape[2] for k, _ in parts)
    width = keys if len(parts) == 1 else _round_up(keys)
    hidden = None if tokens is None else ~make_causal_mask(count, keys, tokens, q.device)
    rows = max(1, min(outer, PIECE_BYTES // (4 * inner * count * width)))
    step = count if rows > 1 else max(1, min(count, PIECE_BYTES // (4 * inner * width)))
    buffer = out.new_empty(rows * inner, step, width)
    padded = out.new_empty(2, rows, inner, width, channels) if len(parts) > 1 else None
    if padded is not None and width > keys:
        padded[..., keys:, :].zero_()
    whole = rows == outer and step == count
    with wide_products(buffer.numel() * channels, q.device):
        for row in range(0, outer, rows):
            at = slice(row, row + rows)
            k, v = _join_parts(parts if whole else [(k[at], v[at]) for k, v in parts], padded)
            for start in range(0, count, step):
                piece, target = (x if whole else x[at, :, start : start + step] for x in (q, out))
                queries = piece.float().flatten(0, 1)
                scores = buffer if whole else buffer[: queries.shape[0], : queries.shape[1]]
                torch.baddbmm(scores, queries, k.mT, beta=0, alpha=scale, out=scores)
                if width > keys:
                    scores[..., keys:].fill_(-torch.inf)
                if hidden is not None:
                    scores[..., :keys].masked_fill_(hidden[start : start + step], -torch.inf)
                if sums is not None:
                    torch.logsumexp(scores, -1, out=sums[at, :, start : start + step].flatten(0, 1))
                _weigh(scores, v, q.dtype, target.flatten(0, 1))
    return out.to(q.dtype), sums


def _padded_attention(
    q: Tensor,
    pasts: Sequence[Sequence[Pair]],
    groups: Sequence[Group],
    present: Pair,
    scale: float,
    tokens: int | None,
    lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Attend for rows of several lengths at once, [rows, batch, queries, D], padded to the longest keys.

    Args:
        q: as in `dense_attention`, with rows first.
        pasts: keys and values [size, batch, length, D] of each group, empty without a past.
        groups: rows by length, longest first.
        present: current keys and values, [rows, batch, tokens, D].
        scale: factor on q k^T.
        tokens: as in `dense_attention`.
        lse: whether to return the log-sum-exp.
    """
    rows, inner, count, channels = q.shape
    more = present[0].shape[2]
    width = _round_up(groups[0].length + more)
    joined = q.new_zeros(2, rows, inner, width, channels, dtype=torch.float32)
    scores = joined.new_empty(rows, inner, count, width)
    out = joined.new_empty(rows * inner, count, channels)
    with wide_products(scores.numel() * channels, q.device):
        ends, first = [], 0
        for group, past in zip(groups, pasts, strict=True):
            at, end = slice(first, first + group.size), group.length + more
            for number, now in enumerate(present):
                if past:
                    joined[number, at, :, : group.length] = past[0][number]
                joined[number, at, :, group.length : end] = now[at]
            ends.append((at, end))
            first = at.stop
        k, v = joined.flatten(1, 2)
        flat = scores.flatten(0, 1)
        torch.baddbmm(flat, q.float().flatten(0, 1), k.mT, beta=0, alpha=scale, out=flat)
        for at, end in ends:
            scores[at, ..., end:].fill_(-torch.inf)
            if tokens is not None:
                scores[at, ..., :end].masked_fill_(
                    ~make_causal_mask(count, end, tokens, q.device), -torch.inf
                )
        sums = torch.logsumexp(scores, -1) if lse else None
        _weigh(flat, v, q.dtype, out)
    return out.unflatten(0, (rows, inner)).to(q.dtype), sums


def _weigh(scores: Tensor, v: Tensor, dtype: torch.dtype, out: Tensor) -> None:
    """Write the softmax of `scores` [pairs, queries, keys] times `v` to `out`; `scores` is overwritten."""
    if dtype == torch.float32:
        torch.softmax(scores, -1, out=scores)
        torch.bmm(scores, v, out=out)
    else:
        total = scores.sub_(scores.amax(-1, keepdim=True)).exp_().sum(-1, keepdim=True)
        torch.bmm(scores.to(dtype).float(), v, out=out)
        out.div_(total)


def _join_parts(parts: Sequence[Pair], padded: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return concatenated keys and values of all parts, float32 [pairs, keys, D], in `padded` if it is set."""
    if padded is None:
        k, v = parts[0]
        return k.float().flatten(0, 1), v.float().flatten(0, 1)
    keys = sum(k.shape[2] for k, _ in parts)
    places = padded[:, : parts[0][0].shape[0]].unbind()
    for place, joined in zip(places, zip(*parts, strict=True), strict=True):
        torch.cat(joined, 2, out=place.narrow(2, 0, keys))
    k, v = (place.flatten(0, 1) for place in places)
    return k, v


def make_causal_mask(queries: int, keys: int, tokens: int, device: torch.device) -> Tensor:
    """Return a mask bool [queries, keys]: query m sees all keys but the last `tokens`, and m % tokens + 1 of these."""
    token = torch.arange(tokens - keys, tokens, device=device)
    return token <= (torch.arange(queries, device=device) % tokens)[:, None]
