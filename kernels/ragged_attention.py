"""Attention of a segment's queries over each row's cached keys and the current segment.

`kernels/attention_paths.py` chooses the path. On CUDA one kernel reads past and present in place, or one kernel reads
the present and another kernel or a library the past. Elsewhere past and present are joined, group by group and in
pieces: products over a copy that stays in the processor's cache cost less than two attentions and their merge. Small
groups are padded to one length and share a call.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial

import torch
from torch import Tensor

from kvbench.kernels.attention_choices import AttentionChoice, note_choice
from kvbench.kernels.attention_paths import LIBRARIES, Path, choose_path, describe, explain_path
from kvbench.kernels.batch_invariance import is_batch_invariant
from kvbench.kernels.fused_attention import explain_backend, fused_attention
from kvbench.kernels.joined_rows import JoinedRows, round_up
from kvbench.kernels.layout import Group, Layout, Past, empty_layout, fold_rows
from kvbench.kernels.past_attention import attend_in_parts
from kvbench.kernels.products import onednn_products

PIECE_BYTES = 4 << 20
"""Maximum bytes of scores that exist at once outside CUDA, so that they stay in the processor's cache."""
PADDED_SCORES = 1 << 15
"""Scores of padding outside CUDA that cost about as much as the calls for one more group."""

DENSE_PRODUCTS = AttentionChoice("dense products", (("fused attention", "needs a GPU"),))
ReadRows = Callable[[slice], tuple[Tensor, Tensor]]
"""Returns keys and values of some rows of q, folded, float32 [pairs, keys, D] each."""


def ragged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past: Past,
    scale: float,
    *,
    causal: bool = False,
    path: Path | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attend to each row's cached slots and the tokens of the current segment.

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
        path: kernels to use; None chooses them on CUDA and uses torch's products elsewhere.
        dtype: dtype of the output, None for q's; float32 if attention over other keys is merged into it later, so that
            it is rounded only once.

    Returns:
        Output [sequences, heads, queries, D]; float32 log-sum-exp [sequences, heads, queries], None from `products`.
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
    joined, tokens = past.joined or JoinedRows(past, k, v), k.shape[2] if causal else None
    if joined.dense:
        return _attend_equal(q, joined.read, joined.keys, joined.width, scale, tokens).to(dtype), None
    out = _attend_unequal(q, joined, past.layout, k.shape[2], scale, causal=causal)
    return out.reshape(q.shape).to(dtype), None


def _attend_unequal(
    q: Tensor, joined: JoinedRows, layout: Layout, tokens: int, scale: float, *, causal: bool
) -> Tensor:
    """Compute `ragged_attention` outside CUDA for rows of unequal length; return [batch, rows, queries, D]."""
    rows = fold_rows(q, joined.batch, len(layout.counts)).transpose(0, 1)
    parts, first = [], 0
    for groups in _join_groups(layout.groups, tokens, joined.batch * q.shape[2]):
        some, first = joined.find_set(groups, first), first + sum(group.size for group in groups)
        part = rows if some.rows is None else rows.index_select(0, some.rows)
        keys, hidden = some.indices.shape[2], (some.least, some.absent)
        if causal:
            hidden = 0, ~make_causal_mask(q.shape[2], keys, tokens, some.ends, q.device)
        parts.append(_attend_pieces(part, partial(joined.read, indices=some.indices), keys, scale, hidden))
    if len(parts) == 1:
        return parts[0].transpose(0, 1)
    # Rows of a token become adjacent, as the next projection reads them.
    return torch.cat(parts).permute(1, 2, 0, 3).index_select(2, layout.places).transpose(1, 2)


def _join_groups(groups: Sequence[Group], tokens: int, scores_per_key: int) -> Iterator[list[Group]]:
    """Yield lists of groups, longest first; groups share a list if padding costs less than another call."""
    together: list[Group] = []
    rows = 0
    for group in groups:
        longest = together[0].length if together else group.length
        padding = group.size * scores_per_key * (longest - group.length)
        whole = 4 * (rows + group.size) * scores_per_key * round_up(longest + tokens)
        if together and (padding > PADDED_SCORES or whole > PIECE_BYTES):
            yield together
            together, rows = [], 0
        together.append(group)
        rows += group.size
    yield together


def dense_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attend to all keys with torch's operations, in float32 and in pieces; on CUDA with torch's fused attention.

    For 16-bit queries weights are rounded as in fused kernels: before the division by their sum.

    Args:
        q: [batch, rows, queries, D].
        k: [batch, rows, keys, D], at least one key.
        v: values, shaped like k.
        scale: factor on q k^T.

    Returns:
        [batch, rows, queries, D] in q's dtype.
    """
    note_choice(lambda: explain_backend(q) if q.is_cuda else DENSE_PRODUCTS)
    if q.is_cuda and is_batch_invariant():
        from kvbench.kernels.triton.ragged_attention import ragged_attention_triton

        empty = k.new_empty(len(k), 0, k.shape[3])
        past = Past(empty, empty, _make_empty_layout(k.shape[1], k.device))
        return ragged_attention_triton(q, k, v, past, scale)[0]
    if q.is_cuda:
        return fused_attention(q, k, v, scale)[0]
    keys, values = (x.float().flatten(0, 1) for x in (k, v))
    return _attend_equal(q, lambda pairs: (keys[pairs], values[pairs]), k.shape[2], k.shape[2], scale)


@cache
def _make_empty_layout(rows: int, device: torch.device) -> Layout:
    """Return the layout of empty rows, cached: a CUDA graph must not contain a copy from the host."""
    return empty_layout(rows, device)


def _attend_equal(
    q: Tensor, read: ReadRows, keys: int, width: int, scale: float, tokens: int | None = None
) -> Tensor:
    """Attend to `keys` keys per row, padded to `width`, with a causal mask over the last `tokens` unless None."""
    if q.shape[0] == 1 < q.shape[1]:  # pieces are cut along the first dimension
        return _attend_equal(q.transpose(0, 1), read, keys, width, scale, tokens).transpose(0, 1)
    hidden: tuple[int, Tensor | None] = keys, None
    if tokens is not None:
        hidden = 0, ~make_causal_mask(q.shape[2], width, tokens, keys, q.device)
    return _attend_pieces(q, read, width, scale, hidden)


def _attend_pieces(
    q: Tensor, read: ReadRows, keys: int, scale: float, hidden: tuple[int, Tensor | None]
) -> Tensor:
    """Attend from q [outer, inner, queries, D] to `keys` keys in every row, in pieces of rows or of queries.

    `hidden` has the first key that may be hidden, and a mask of hidden keys from there on, bool [outer or 1, 1,
    queries or 1, keys left]; None hides all of them.
    """
    out = q.new_empty(q.shape, dtype=torch.float32)
    outer, inner, count, channels = q.shape
    rows = max(1, min(outer, PIECE_BYTES // (4 * inner * count * keys)))
    step = count if rows > 1 else max(1, min(count, PIECE_BYTES // (4 * inner * keys)))
    buffer = out.new_empty(rows * inner, step, keys)
    whole = rows == outer and step == count
    first, mask = hidden
    if mask is not None and not whole:
        mask = mask.expand(outer, 1, count, -1)
    with onednn_products(buffer.numel() * channels, q.device):
        for row in range(0, outer, rows):
            k, v = read(slice(row * inner, (row + rows) * inner))
            for start in range(0, count, step):
                index = slice(row, row + rows), slice(None), slice(start, start + step)
                piece, target = (x if whole else x[index] for x in (q, out))
                queries = piece.float().flatten(0, 1)
                scores = buffer if whole else buffer[: queries.shape[0], : queries.shape[1]]
                torch.baddbmm(scores, queries, k.mT, beta=0, alpha=scale, out=scores)
                if mask is not None:
                    tail = scores.unflatten(0, (-1, inner))[..., first:]
                    tail.masked_fill_(mask if whole else mask[index], -torch.inf)
                elif first < keys:
                    scores[..., first:].fill_(-torch.inf)
                _weigh(scores, v, q.dtype, target.flatten(0, 1))
    return out.to(q.dtype)


def _weigh(scores: Tensor, v: Tensor, dtype: torch.dtype, out: Tensor) -> None:
    """Write the softmax of `scores` [pairs, queries, keys] times `v` to `out`; `scores` is overwritten."""
    if dtype == torch.float32:
        torch.softmax(scores, -1, out=scores)
        torch.bmm(scores, v, out=out)
    else:
        total = scores.sub_(scores.amax(-1, keepdim=True)).exp_().sum(-1, keepdim=True)
        torch.bmm(scores.to(dtype).float(), v, out=out)
        out.div_(total)


def make_causal_mask(
    queries: int, keys: int, tokens: int, ends: Tensor | int, device: torch.device
) -> Tensor:
    """Return a mask bool [..., queries, keys]: query m sees m % tokens + 1 of the last `tokens`, and all keys before.

    `ends` [..., 1, 1] counts the keys before the padding.
    """
    token = torch.arange(keys, device=device) + tokens - ends
    return token <= (torch.arange(queries, device=device) % tokens)[:, None]
