"""Ragged attention in one pass over past and present (see `ragged_attention` in `kernels/ragged_attention.py`).

Online softmax in base 2 with float32 statistics. Loops over full tiles have a known number of steps and no mask, so
that the compiler prefetches the next tiles. A row's past ends in at most one masked tile; its present may have several
if it is causal. A program handles a block of queries of one row, longest rows first. With few queries, several programs
split the keys of a row.

Shapes: B batch, R rows, M queries, N keys of a tile, D channels, S splits of a row's keys.
"""

import torch
import triton.language as tl
from torch import Tensor

from kvbench.kernels.layout import Past
from kvbench.kernels.triton.launch import (
    LOG2_E,
    align_rows,
    cdiv,
    kernel,
    list_constants,
    load_queries,
    locate_row,
    make_partials,
)
from kvbench.kernels.triton.softmax import attend_slots, finish_shares, store_state
from kvbench.kernels.triton.tiles import choose_tile, count_splits, fit_keys


@kernel("lse", "offsets", "lengths", "order")
def attention_kernel(
    q, k, v, past_keys, past_values, out, partial, lse, offsets, lengths, order,
    scale: tl.float32, heads: tl.int32, rows: tl.int32, queries: tl.int32, tokens: tl.int32, slots: tl.int64,
    splits: tl.int32,
    q_b: tl.int64, q_r: tl.int64, q_t: tl.int64, k_b: tl.int64, k_r: tl.int64, k_t: tl.int64,
    v_b: tl.int64, v_r: tl.int64, v_t: tl.int64, out_b: tl.int64, out_r: tl.int64, out_t: tl.int64,
    UNIT: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend. Grid: query block (fastest), sequence and split of the keys, rank of the row by length (slowest).

    Rows are the heads of one sequence, or, if sequences keep different slots, of all sequences with a batch of 1.
    Strides count `UNIT` elements; `scale` includes log2(e). `softmax.store_state` stores the results.
    """
    WHOLE_D: tl.constexpr = HEAD_DIM == BLOCK_D
    row, batch, part, sequence, head, length = locate_row(order, lengths, heads, splits)
    query, inside, channel, fits, q_tile = load_queries(
        q, q_b, q_r, q_t, sequence, head, queries, UNIT, HEAD_DIM, BLOCK_D, BLOCK_M
    )
    slot = tl.arange(0, BLOCK_N)

    past_tile = tl.full((), BLOCK_N * HEAD_DIM, tl.int64)
    past = (batch * slots + tl.load(offsets + row)) * HEAD_DIM
    past_keys += past
    past_values += past
    k += (sequence * k_b + head * k_r) * UNIT
    v += (sequence * v_b + head * v_r) * UNIT

    # Split of this program: tiles of the past, then of the present.
    past_tiles = tl.cdiv(length, BLOCK_N)
    share = tl.cdiv(past_tiles + tl.cdiv(tokens, BLOCK_N), splits)
    begin = part * share
    end = begin + share
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    whole = length // BLOCK_N
    for index in tl.range(tl.minimum(begin, whole), tl.minimum(end, whole)):
        at = index * past_tile
        acc, top, total = attend_slots(
            acc, top, total, q_tile, past_keys + at, HEAD_DIM, past_values + at, HEAD_DIM, slot, channel, fits,
            None, None, scale, WHOLE_D, True, False, PRECISION,
        )  # fmt: skip
    if (whole < past_tiles) & (begin <= whole) & (whole < end):
        at = whole * past_tile
        keep = whole * BLOCK_N + slot < length
        acc, top, total = attend_slots(
            acc, top, total, q_tile, past_keys + at, HEAD_DIM, past_values + at, HEAD_DIM, slot, channel, fits,
            keep, keep[None, :], scale, WHOLE_D, False, False, PRECISION,
        )  # fmt: skip

    begin = tl.maximum(begin - past_tiles, 0)
    end = tl.maximum(end - past_tiles, 0)
    k_step = (k_t * UNIT).to(tl.int32)
    v_step = (v_t * UNIT).to(tl.int32)
    k_tile = k_t * (UNIT * BLOCK_N)
    v_tile = v_t * (UNIT * BLOCK_N)
    whole = tokens // BLOCK_N
    last = tl.cdiv(tokens, BLOCK_N)
    if CAUSAL:
        first = tl.program_id(0) * BLOCK_M
        # Tokens of the block's first and last query; a block that wraps around may contain every token.
        final = tl.minimum(first + BLOCK_M, queries) - 1
        same = first // tokens == final // tokens
        lowest = tl.where(same, first % tokens, 0)
        highest = tl.where(same, final % tokens, tokens - 1)
        whole = tl.minimum(whole, (lowest + 1) // BLOCK_N)
        last = tl.minimum(last, highest // BLOCK_N + 1)
    for index in tl.range(tl.minimum(begin, whole), tl.minimum(end, whole)):
        acc, top, total = attend_slots(
            acc, top, total, q_tile, k + index * k_tile, k_step, v + index * v_tile, v_step, slot, channel, fits,
            None, None, scale, WHOLE_D, True, False, PRECISION,
        )  # fmt: skip
    for index in tl.range(tl.maximum(begin, whole), tl.minimum(end, last), num_stages=1):
        token = index * BLOCK_N + slot
        keep = token < tokens
        seen = keep[None, :]
        if CAUSAL:
            seen = seen & (token[None, :] <= (query % tokens)[:, None])
        acc, top, total = attend_slots(
            acc, top, total, q_tile, k + index * k_tile, k_step, v + index * v_tile, v_step, slot, channel, fits,
            keep, seen, scale, WHOLE_D, False, CAUSAL, PRECISION,
        )  # fmt: skip

    batches = tl.num_programs(1) // splits
    place = ((part * batches + batch) * rows + row) * queries + query
    written = query.to(tl.int64)[:, None] * (out_t * UNIT) + channel[None, :]
    out += (sequence * out_b + head * out_r) * UNIT
    stored = inside[:, None] & fits[None, :]
    store_state(out, partial, lse, written, place, acc, top, total, inside, stored, channel, splits, HEAD_DIM)


def ragged_attention_triton(
    q: Tensor, k: Tensor, v: Tensor, past: Past, scale: float, *, causal: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `kernels.ragged_attention.ragged_attention` on a GPU."""
    sequences, heads, queries, channels = q.shape
    layout = past.layout
    batch, slots, _ = past.keys.shape
    rows, tokens = sequences * heads // batch, k.shape[2]
    (q, q_strides), (k, k_strides), (v, v_strides) = align_rows(q), align_rows(k), align_rows(v)
    sizes = choose_tile("attention", channels, q.dtype, queries, batch * rows, q.device)
    sizes = sizes.with_keys(fit_keys(layout, tokens, sizes.keys))
    blocks = cdiv(queries, sizes.queries)
    share = count_splits(batch * rows * blocks, layout.longest + tokens, sizes, q.device)
    out = make_output(q, dtype)
    _, out_strides = align_rows(out)
    partial, lse = make_partials(q, share)
    attention_kernel[blocks, batch * share, rows](
        q, k, v, past.keys, past.values, out, partial, lse,
        layout.offsets, layout.lengths, layout.order, scale * LOG2_E,
        heads, rows, queries, tokens, slots, share, *q_strides, *k_strides, *v_strides, *out_strides,
        **list_constants(q), BLOCK_M=sizes.queries, BLOCK_N=sizes.keys, CAUSAL=causal,
        num_warps=sizes.warps, num_stages=sizes.stages,
    )  # fmt: skip
    return finish_shares(partial, lse, out)


def make_output(q: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return an empty output in the memory order of the queries, so that merging heads inside tokens needs no copy."""
    batch, rows, queries, channels = q.shape
    if q.stride(1) < q.stride(2):
        return q.new_empty(batch, queries, rows, channels, dtype=dtype).transpose(1, 2)
    return q.new_empty(q.shape, dtype=dtype)
