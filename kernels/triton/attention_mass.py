"""Attention mass of each key, in two passes over q k^T (see `attention_mass` in `kernels/attention_mass.py`).

The first pass computes every query's log-sum-exp unless it is given. The second sums probabilities over the queries,
one program per tile of keys, without atomic additions, so that equal inputs give equal bytes.

Shapes: B batch, R rows, M queries, N keys of a tile, D channels.
"""

import torch
import triton
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
    load_tile,
    locate_row,
)
from kvbench.kernels.triton.softmax import add_scores, score_slots
from kvbench.kernels.triton.tiles import choose_tile


@kernel("lse", "token", "offsets", "lengths", "order")
def sum_kernel(
    q, k, past_keys, lse, token, offsets, lengths, order,
    scale: tl.float32, heads: tl.int32, rows: tl.int32, queries: tl.int32, tokens: tl.int32, slots: tl.int64,
    q_b: tl.int64, q_r: tl.int64, q_t: tl.int64, k_b: tl.int64, k_r: tl.int64, k_t: tl.int64,
    UNIT: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the log-sum-exp of each query, float32 [B, R, M]. Grid: query block, sequence, rank of the row."""
    WHOLE_D: tl.constexpr = HEAD_DIM == BLOCK_D
    row, batch, _, sequence, head, length = locate_row(order, lengths, heads, 1)
    query, inside, channel, fits, q_tile = load_queries(
        q, q_b, q_r, q_t, sequence, head, queries, UNIT, HEAD_DIM, BLOCK_D, BLOCK_M
    )
    slot = tl.arange(0, BLOCK_N)
    past_tile = tl.full((), BLOCK_N * HEAD_DIM, tl.int64)
    past_keys += (batch * slots + tl.load(offsets + row)) * HEAD_DIM
    k += (sequence * k_b + head * k_r) * UNIT
    k_step = (k_t * UNIT).to(tl.int32)
    k_tile = k_t * (UNIT * BLOCK_N)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)

    whole = length // BLOCK_N
    for index in tl.range(0, whole):
        top, total = _sum_slots(
            top, total, q_tile, past_keys + index * past_tile, HEAD_DIM, slot, channel, fits, None, None, scale,
            WHOLE_D, True, False, PRECISION,
        )  # fmt: skip
    if whole * BLOCK_N < length:
        keep = whole * BLOCK_N + slot < length
        top, total = _sum_slots(
            top, total, q_tile, past_keys + whole * past_tile, HEAD_DIM, slot, channel, fits, keep, keep[None, :],
            scale, WHOLE_D, False, False, PRECISION,
        )  # fmt: skip
    if CAUSAL:
        last = tl.load(token + query, mask=inside, other=0)
        for index in tl.range(0, tl.cdiv(tokens, BLOCK_N)):
            place = index * BLOCK_N + slot
            top, total = _sum_slots(
                top, total, q_tile, k + index * k_tile, k_step, slot, channel, fits, place < tokens,
                place[None, :] <= last[:, None], scale, WHOLE_D, False, True, PRECISION,
            )  # fmt: skip
    else:
        whole = tokens // BLOCK_N
        for index in tl.range(0, whole):
            top, total = _sum_slots(
                top, total, q_tile, k + index * k_tile, k_step, slot, channel, fits, None, None, scale,
                WHOLE_D, True, False, PRECISION,
            )  # fmt: skip
        if whole * BLOCK_N < tokens:
            keep = whole * BLOCK_N + slot < tokens
            top, total = _sum_slots(
                top, total, q_tile, k + whole * k_tile, k_step, slot, channel, fits, keep, keep[None, :], scale,
                WHOLE_D, False, False, PRECISION,
            )  # fmt: skip
    tl.store(
        lse + (batch * rows + row) * queries + query, (top + tl.log2(total)) * 0.6931471805599453, mask=inside
    )


@triton.jit
def _sum_slots(
    top, total, q_tile, keys, step, slot, channel, fits, keep, seen, scale,
    WHOLE_D: tl.constexpr, WHOLE: tl.constexpr, GUARD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    scores = score_slots(q_tile, keys, step, slot, channel, fits, keep, seen, WHOLE_D, WHOLE, PRECISION)
    _, _, top, total = add_scores(top, total, scores, scale, GUARD)
    return top, total


@kernel("lse", "token", "mass", "offsets", "lengths", "order")
def mass_kernel(
    q, k, past_keys, lse, token, mass, offsets, lengths, order,
    scale: tl.float32, heads: tl.int32, rows: tl.int32, queries: tl.int32, tokens: tl.int32,
    longest: tl.int32, slots: tl.int64,
    q_b: tl.int64, q_r: tl.int64, q_t: tl.int64, k_b: tl.int64, k_r: tl.int64, k_t: tl.int64,
    UNIT: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, POWER: tl.constexpr,
):  # fmt: skip
    """Store the mass of a tile of keys. Grid: tile (of the past, then of the present), sequence, rank of the row."""
    WHOLE_D: tl.constexpr = HEAD_DIM == BLOCK_D
    row, batch, _, sequence, head, length = locate_row(order, lengths, heads, 1)
    past_tiles = tl.cdiv(longest, BLOCK_N)
    index = tl.program_id(0)
    present = index >= past_tiles
    slot = tl.arange(0, BLOCK_N)
    channel = tl.arange(0, BLOCK_D)
    fits = channel < HEAD_DIM
    first = tl.where(present, index - past_tiles, index) * BLOCK_N
    count = tl.where(present, tokens, length)  # keys to read
    width = tl.where(present, tokens, longest)  # entries to write
    mass += (batch * rows + row) * (longest + tokens) + tl.where(present, longest, 0) + first
    received = tl.zeros([BLOCK_N], tl.float32)
    if first < count:
        keep = first + slot < count
        if present:
            k += (sequence * k_b + head * k_r + first.to(tl.int64) * k_t) * UNIT
            step = (k_t * UNIT).to(tl.int32)
            keys = load_tile(k, step, slot, channel, fits, keep, WHOLE_D, False).to(q.dtype.element_ty)
        else:
            past_keys += (batch * slots + tl.load(offsets + row) + first) * HEAD_DIM
            keys = load_tile(past_keys, HEAD_DIM, slot, channel, fits, keep, WHOLE_D, False).to(
                q.dtype.element_ty
            )
        q += (sequence * q_b + head * q_r) * UNIT
        lse += (batch * rows + row) * queries
        q_step = (q_t * UNIT).to(tl.int32)
        q_block = q_t * (UNIT * BLOCK_M)
        query = tl.arange(0, BLOCK_M)
        if CAUSAL:
            # An infinite log-sum-exp gives masked keys no weight.
            place = tl.where(present, first + slot, -1)
            for block in tl.range(0, tl.cdiv(queries, BLOCK_M)):
                inside = block * BLOCK_M + query < queries
                q_tile = load_tile(q + block * q_block, q_step, query, channel, fits, inside, WHOLE_D, False)
                one = tl.load(lse + block * BLOCK_M + query, mask=inside, other=float("inf"))
                last = tl.load(token + block * BLOCK_M + query, mask=inside, other=0)
                seen = tl.where(place[:, None] <= last[None, :], one[None, :], float("inf"))
                received += _received(keys, q_tile, seen, scale, POWER, PRECISION)
        else:
            whole = queries // BLOCK_M
            for block in tl.range(0, whole):
                q_tile = load_tile(q + block * q_block, q_step, query, channel, fits, None, WHOLE_D, True)
                one = tl.load(lse + block * BLOCK_M + query)
                received += _received(keys, q_tile, one[None, :], scale, POWER, PRECISION)
            if whole * BLOCK_M < queries:
                inside = whole * BLOCK_M + query < queries
                q_tile = load_tile(q + whole * q_block, q_step, query, channel, fits, inside, WHOLE_D, False)
                one = tl.load(lse + whole * BLOCK_M + query, mask=inside, other=float("inf"))  # weight 0
                received += _received(keys, q_tile, one[None, :], scale, POWER, PRECISION)
    tl.store(mass + slot, tl.where(first + slot < count, received / queries, 0.0), mask=first + slot < width)


@triton.jit
def _received(keys, q_tile, lse, scale, POWER: tl.constexpr, PRECISION: tl.constexpr):
    scores = tl.dot(keys, tl.trans(q_tile), input_precision=PRECISION)
    weights = tl.exp2((scores * scale - lse * 1.4426950408889634) * POWER)
    return tl.sum(weights, 1)


def attention_mass_triton(
    q: Tensor, k: Tensor, past: Past, scale: float, *, power: int = 1, lse: Tensor | None = None,
    tokens: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute `kernels.attention_mass.attention_mass` on a GPU; `tokens` is int32 [M] or None."""
    _, heads, queries, channels = q.shape
    layout, batch, rows = past.layout, len(past.keys), len(past.layout.counts)
    present, longest = k.shape[2], layout.longest
    (q, q_strides), (k, k_strides) = align_rows(q), align_rows(k)
    mass = q.new_empty(batch, rows, longest + present, dtype=torch.float32)
    where = (layout.offsets, layout.lengths, layout.order, scale * LOG2_E, heads, rows, queries, present)
    strides = (past.keys.shape[1], *q_strides, *k_strides)
    block, keys, warps, stages = choose_tile("mass", channels, q.dtype, queries, batch * rows, q.device)
    options = {
        **list_constants(q), "BLOCK_M": block, "BLOCK_N": keys, "CAUSAL": tokens is not None, "num_warps": warps,
        "num_stages": stages,
    }  # fmt: skip
    token = layout.lengths if tokens is None else tokens  # not read unless causal
    if lse is None:
        lse = q.new_empty(batch, rows, queries, dtype=torch.float32)
        sum_kernel[cdiv(queries, block), batch, rows](
            q, k, past.keys, lse, token, *where, *strides, **options
        )
    tiles = cdiv(longest, keys) + cdiv(present, keys)
    mass_kernel[tiles, batch, rows](
        q, k, past.keys, lse, token, mass, *where, longest, *strides, **options, POWER=power
    )
    return mass
