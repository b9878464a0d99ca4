"""Attention of one new token per row; the kernel also appends the token's key and value to the row.

A program handles a split of a row's keys for all query heads that read them. Offsets and lengths of
rows and the number of earlier tokens of the segment are read on the device; all other arguments are constant in a
generation, so that one launch can be recorded and repeated.

Shapes: B batch, R rows, M queries (query heads of a row), N keys of a tile, D channels, S splits of a row's keys.
"""

import triton.language as tl
from torch import Tensor

from kvbench.kernels.layout import RowOffsets
from kvbench.kernels.triton.launch import (
    LOG2_E,
    align_rows,
    kernel,
    list_constants,
    load_tile,
    make_partials,
    next_power_of_2,
)
from kvbench.kernels.triton.softmax import add_tile, attend_slots, finish_shares, score_tile, store_state
from kvbench.kernels.triton.tiles import choose_tile, count_splits


@kernel("lse", "key_offsets", "value_offsets", "lengths", "order", "stride", "filled")
def decode_kernel(
    q, k, v, past_keys, past_values, out, partial, lse,
    key_offsets, value_offsets, lengths, order, stride, filled,
    scale: tl.float32, rows: tl.int32, queries: tl.int32, splits: tl.int32,
    q_b: tl.int64, q_r: tl.int64, q_t: tl.int64, k_b: tl.int64, k_r: tl.int64, v_b: tl.int64, v_r: tl.int64,
    UNIT: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend and append one token. Grid: sequence and split of the keys (fastest), rank of the row by length.

    Strides count `UNIT` elements; `scale` includes log2(e). `softmax.store_state` stores the results.
    """
    WHOLE_D: tl.constexpr = HEAD_DIM == BLOCK_D
    row = tl.load(order + tl.program_id(1)).to(tl.int64)
    batch = (tl.program_id(0) // splits).to(tl.int64)
    part = tl.program_id(0) % splits
    length = tl.load(lengths + row) + tl.load(filled).to(tl.int32)
    query = tl.arange(0, BLOCK_M)
    slot = tl.arange(0, BLOCK_N)
    channel = tl.arange(0, BLOCK_D)
    fits = channel < HEAD_DIM

    step = tl.full((), BLOCK_N * HEAD_DIM, tl.int64)
    first = batch * tl.load(stride)
    past_keys += (first + tl.load(key_offsets + row)) * HEAD_DIM
    past_values += (first + tl.load(value_offsets + row)) * HEAD_DIM
    q += (batch * q_b + row * q_r) * UNIT
    q_tile = load_tile(q, (q_t * UNIT).to(tl.int32), query, channel, fits, query < queries, WHOLE_D, False)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    # The last tile of a row is never full: it ends with the new token.
    whole = length // BLOCK_N
    share = whole // splits + 1
    begin = part * share
    end = begin + share
    for index in tl.range(tl.minimum(begin, whole), tl.minimum(end, whole), num_stages=STAGES):
        at = index * step
        acc, top, total = attend_slots(
            acc, top, total, q_tile, past_keys + at, HEAD_DIM, past_values + at, HEAD_DIM, slot, channel, fits,
            None, None, scale, WHOLE_D, True, False, PRECISION,
        )  # fmt: skip
    if (begin <= whole) & (whole < end):
        place = whole * BLOCK_N + slot
        at = whole * step
        new = (place == length)[:, None]
        # Rounded to the stored dtype, so that later steps see the same key and value.
        k += (batch * k_b + row * k_r) * UNIT
        key = tl.load(k + channel, mask=fits, other=0.0).to(past_keys.dtype.element_ty)
        v += (batch * v_b + row * v_r) * UNIT
        value = tl.load(v + channel, mask=fits, other=0.0).to(past_values.dtype.element_ty)
        keys = load_tile(past_keys + at, HEAD_DIM, slot, channel, fits, place < length, WHOLE_D, False)
        keys = tl.where(new, key[None, :], keys)
        scores = score_tile(q_tile, keys.to(q.dtype.element_ty), PRECISION)
        scores = tl.where((place <= length)[None, :], scores, float("-inf"))
        values = load_tile(past_values + at, HEAD_DIM, slot, channel, fits, place < length, WHOLE_D, False)
        values = tl.where(new, value[None, :], values)
        acc, top, total = add_tile(
            acc, top, total, scores, values.to(q.dtype.element_ty), scale, False, PRECISION
        )
        end_of_row = length.to(tl.int64) * HEAD_DIM + channel
        tl.store(past_keys + end_of_row, key, mask=fits)
        tl.store(past_values + end_of_row, value, mask=fits)

    batches = tl.num_programs(0) // splits
    place = ((part * batches + batch) * rows + row) * queries + query
    inside = query < queries
    stored = inside[:, None] & fits[None, :]
    written = place[:, None] * HEAD_DIM + channel[None, :]
    store_state(out, partial, lse, written, place, acc, top, total, inside, stored, channel, splits, HEAD_DIM)


def decode_attention_triton(q: Tensor, k: Tensor, v: Tensor, rows: RowOffsets, scale: float) -> Tensor:
    """Compute `kernels.decode_attention.decode_token` on a GPU; the result is contiguous."""
    batch, count, queries, channels = q.shape
    (q, q_strides), (k, k_strides), (v, v_strides) = align_rows(q), align_rows(k), align_rows(v)
    sizes = choose_tile("decode", channels, q.dtype, queries, batch * count, q.device)
    sizes = sizes._replace(queries=max(sizes.queries, next_power_of_2(queries)))
    share = count_splits(batch * count, rows.longest, sizes, q.device)
    out = q.new_empty(batch, count, queries, channels)
    partial, lse = make_partials(q, share)
    decode_kernel[batch * share, count](
        q, k, v, rows.keys, rows.values, out, partial, lse, *rows[2:-1], scale * LOG2_E,
        count, queries, share, *q_strides, *k_strides[:2], *v_strides[:2],
        **list_constants(q), BLOCK_M=sizes.queries, BLOCK_N=sizes.keys, STAGES=sizes.stages,
        num_warps=sizes.warps, num_stages=sizes.stages,
    )  # fmt: skip
    return finish_shares(partial, lse, out)[0]
