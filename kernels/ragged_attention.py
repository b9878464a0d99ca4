"""Attention of a segment's queries over each row's own cached keys and the whole current segment.

`kernels/attention_paths.py` chooses the path. On CUDA one kernel reads both where they lie, or one the present and
another one, or a library, the past. Elsewhere rows of equal length are put together with the present, one such group
after the other and piece by piece: products over a copy that stays in the cache cost less there than two attentions and
their merger. Groups of so few scores that a call costs more than padding are padded and go together.
"""

from collections.abc import Iterator, Sequence
from functools import cache

import torch
from torch import Tensor

from kvbench.kernels.attention_choices import Choice, note_choice
from kvbench.kernels.attention_paths import LIBRARIES, Path, choose_path, describe, explain_path
from kvbench.kernels.batch_invariance import is_batch_invariant
from kvbench.kernels.fused_attention import explain_backend, fused_attention
from kvbench.kernels.layout import Group, Layout, Past, empty_layout, fold_rows, view_group
from kvbench.kernels.past_attention import attend_in_parts
from kvbench.kernels.products import wide_products

PIECE_BYTES = 4 << 20
"""Bytes of scores that exist at a time outside CUDA, so that they stay in the cache."""
LANES = 16
"""Keys that are put together are padded to a multiple: softmax over 399 numbers takes longer than over 400."""
PADDED_SCORES = 1 << 15
"""Scores of padding outside CUDA that cost about as much as the calls for one more group."""

DENSE_PRODUCTS = Choice("dense products", (("fused attention", "needs a GPU"),))
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

    q, k and v may have any strides. On CUDA, D is a multiple of 8 and at most 256.

    Args:
        q: [sequences, heads, queries, D], whose heads are the layout's rows, one sequence after the other where each
            has rows of its own; with grouped queries the heads of one KV head lie behind each other in `queries`:
            query m belongs to token m % tokens.
        k: current keys [sequences, heads, tokens, D].
        v: current values, shaped like `k`.
        past: stored keys and values, read in q's dtype.
        scale: factor on q k^T, positive.
        causal: current tokens are seen by themselves and those after them; else by all.
        lse: whether the log-sum-exp is wanted.
        path: by which kernels; None for the one that is chosen on CUDA, and for torch's products elsewhere.
        dtype: of the output, None for q's; float32 where attention over other keys will join it, so that it is rounded
            once, after that.

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
    asked, k, v = (fold_rows(x, len(past.keys), len(past.layout.counts)) for x in (q, k, v))
    out, sums = _attend_folded(asked, k, v, past, scale, causal=causal, lse=lse)
    return out.reshape(q.shape).to(dtype), None if sums is None else sums.reshape(q.shape[:3])


def _attend_folded(
    q: Tensor, k: Tensor, v: Tensor, past: Past, scale: float, *, causal: bool, lse: bool
) -> tuple[Tensor, Tensor | None]:
    """`ragged_attention` outside CUDA, over rows [batch, rows, queries, D] as the layout counts them."""
    tokens, layout = k.shape[2] if causal else None, past.layout
    if layout.uniform:
        return _attention(q, [*_view_past(past, layout.groups[0], q.dtype), (k, v)], scale, tokens, lse)
    # Rows in the order of the storage, where equally long ones are neighbours.
    q, k, v = (x.transpose(0, 1).index_select(0, layout.order) for x in (q, k, v))
    found, first = [], 0
    for groups in _neighbours(layout.groups, k.shape[2], q.shape[1] * q.shape[2]):
        rows = slice(first, first + sum(group.size for group in groups))
        present = k[rows], v[rows]
        pasts = [
            [(x.transpose(0, 1), y.transpose(0, 1)) for x, y in _view_past(past, group, q.dtype)]
            for group in groups
        ]
        if len(groups) == 1:
            found.append(_attention(q[rows], [*pasts[0], present], scale, tokens, lse))
        else:
            found.append(_padded_attention(q[rows], pasts, groups, present, scale, tokens, lse))
        first = rows.stop
    # Gathered so that a token's rows are neighbours, as the projection that follows wants them.
    out = (
        torch.cat([out for out, _ in found])
        .permute(1, 2, 0, 3)
        .index_select(2, layout.places)
        .transpose(1, 2)
    )
    sums = [sums.transpose(0, 1) for _, sums in found if sums is not None]
    return out, torch.cat(sums, 1).index_select(1, layout.places) if sums else None


def _neighbours(groups: Sequence[Group], tokens: int, each: int) -> Iterator[list[Group]]:
    """Yield groups, longest first, those together that are cheaper padded to the first one's length than alone.

    Args:
        groups: rows by length, longest first.
        tokens: of the present.
        each: scores of a row per key.
    """
    together: list[Group] = []
    rows = 0
    for group in groups:
        longest = together[0].length if together else group.length
        padding = group.size * each * (longest - group.length)
        whole = 4 * (rows + group.size) * each * _round_up(longest + tokens)
        if together and (padding > PADDED_SCORES or whole > PIECE_BYTES):
            yield together
            together, rows = [], 0
        together.append(group)
        rows += group.size
    yield together


def _round_up(keys: int) -> int:
    return -(-keys // LANES) * LANES


def _view_past(past: Past, group: Group, dtype: torch.dtype) -> list[Pair]:
    if not group.length:
        return []
    return [(view_group(past.keys, group).to(dtype), view_group(past.values, group).to(dtype))]


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, tokens: int | None = None, lse: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Attention in torch's own operations, float32 inside, piece by piece; on CUDA by torch's fused attention.

    For queries of fewer bits weights are rounded as fused kernels round them: those up to 1, before their sum divides.

    Args:
        q: [batch, rows, queries, D].
        k: [batch, rows, keys, D], at least one key.
        v: values, shaped like k.
        scale: factor on q k^T.
        tokens: the last so many keys are seen causally: query m sees of them the first m % tokens + 1; None: all.
        lse: whether the log-sum-exp is wanted.

    Returns:
        Output in q's dtype [batch, rows, queries, D]; float32 log-sum-exp [batch, rows, queries] or None.
    """
    whole = q.is_cuda and tokens is None
    note_choice(lambda: explain_backend(q) if whole else DENSE_PRODUCTS)
    if whole and is_batch_invariant():
        from kvbench.kernels.triton.ragged_attention import ragged_attention_triton

        nothing = k.new_empty(len(k), 0, k.shape[3])
        past = Past(nothing, nothing, _lay_out_nothing(k.shape[1], k.device))
        return ragged_attention_triton(q, k, v, past, scale)
    if whole:
        return fused_attention(q, k, v, scale)
    return _attention(q, [(k, v)], scale, tokens, lse)


@cache
def _lay_out_nothing(rows: int, device: torch.device) -> Layout:
    """Return the layout of rows that hold nothing, made once: no copy from the host may be part of a CUDA graph."""
    return empty_layout(rows, device)


def _attention(
    q: Tensor, parts: Sequence[Pair], scale: float, tokens: int | None, lse: bool
) -> tuple[Tensor, Tensor | None]:
    """`dense_attention` over the keys and values of all parts together."""
    if len(q) == 1 < q.shape[1]:  # pieces are cut along the first dimension
        parts = [(k.transpose(0, 1), v.transpose(0, 1)) for k, v in parts]
        out, sums = _attention(q.transpose(0, 1), parts, scale, tokens, lse)
        return out.transpose(0, 1), None if sums is None else sums.transpose(0, 1)
    out = q.new_empty(q.shape, dtype=torch.float32)
    sums = q.new_empty(q.shape[:3], dtype=torch.float32) if lse else None
    outer, inner, count, channels = q.shape
    keys = sum(k.shape[2] for k, _ in parts)
    width = keys if len(parts) == 1 else _round_up(keys)
    hidden = None if tokens is None else ~seen_by(count, keys, tokens, q.device)
    rows = max(1, min(outer, PIECE_BYTES // (4 * inner * count * width)))
    some = count if rows > 1 else max(1, min(count, PIECE_BYTES // (4 * inner * width)))
    buffer = out.new_empty(rows * inner, some, width)
    padded = out.new_empty(2, rows, inner, width, channels) if len(parts) > 1 else None
    if padded is not None and width > keys:
        padded[..., keys:, :].zero_()
    with wide_products(buffer.numel() * channels, q.device):
        for row in range(0, outer, rows):
            at = slice(row, row + rows)
            k, v = _joined([(k[at], v[at]) for k, v in parts], padded)
            for start in range(0, count, some):
                asked = q[at, :, start : start + some].float().flatten(0, 1)
                scores = buffer[: len(asked), : asked.shape[1]]
                torch.baddbmm(scores, asked, k.mT, beta=0, alpha=scale, out=scores)
                if width > keys:
                    scores[..., keys:].fill_(-torch.inf)
                if hidden is not None:
                    scores[..., :keys].masked_fill_(hidden[start : start + some], -torch.inf)
                if sums is not None:
                    torch.logsumexp(scores, -1, out=sums[at, :, start : start + some].flatten(0, 1))
                _weigh(scores, v, q.dtype, out[at, :, start : start + some].flatten(0, 1))
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
    """Rows of several lengths at once, [rows, batch, queries, D], all padded to the first ones' keys.

    Args:
        q: as in `dense_attention`, with rows first.
        pasts: each group's keys and values [size, batch, length, D], none where it has no past.
        groups: rows by length, longest first.
        present: keys and values that follow every past, [rows, batch, tokens, D].
        scale: factor on q k^T.
        tokens: as in `dense_attention`.
        lse: whether the log-sum-exp is wanted.
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
                scores[at, ..., :end].masked_fill_(~seen_by(count, end, tokens, q.device), -torch.inf)
        sums = torch.logsumexp(scores, -1) if lse else None
        _weigh(flat, v, q.dtype, out)
    return out.unflatten(0, (rows, inner)).to(q.dtype), sums


def _weigh(scores: Tensor, v: Tensor, dtype: torch.dtype, out: Tensor) -> None:
    """Write the softmax of `scores` [pairs, queries, keys] times `v` to `out`; `scores` are used up."""
    if dtype == torch.float32:
        torch.softmax(scores, -1, out=scores)
        torch.bmm(scores, v, out=out)
    else:
        total = scores.sub_(scores.amax(-1, keepdim=True)).exp_().sum(-1, keepdim=True)
        torch.bmm(scores.to(dtype).float(), v, out=out)
        out.div_(total)


def _joined(parts: Sequence[Pair], padded: Tensor | None) -> tuple[Tensor, Tensor]:
    """Keys and values of all parts behind each other, float32 [pairs, keys, D]; with padding they lie in `padded`."""
    if padded is None:
        k, v = parts[0]
        return k.float().flatten(0, 1), v.float().flatten(0, 1)
    place, start = padded[:, : len(parts[0][0])], 0
    for k, v in parts:
        stop = start + k.shape[2]
        place[0, :, :, start:stop] = k
        place[1, :, :, start:stop] = v
        start = stop
    return place[0].flatten(0, 1), place[1].flatten(0, 1)


def seen_by(queries: int, keys: int, tokens: int, device: torch.device) -> Tensor:
    """Bool [queries, keys]: query m sees all but the last `tokens` keys, and of those the first m % tokens + 1."""
    token = torch.arange(tokens - keys, tokens, device=device)
    return token <= (torch.arange(queries, device=device) % tokens)[:, None]
