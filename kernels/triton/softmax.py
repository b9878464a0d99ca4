"""Online softmax in base 2, tile by tile, and the merge of attention over splits of the keys.

Shapes: B batch, R rows, M queries, N keys of a tile, D channels, S splits of a row's keys. The state of a softmax is
float32: `acc` [M, D], weighted sum of values; `top` [M], largest scaled score; `total` [M], sum of weights.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.triton.launch import align_rows, cdiv, find_unit, kernel, load_tile, next_power_of_2


@triton.jit
def score_tile(q_tile, keys, PRECISION: tl.constexpr):
    """Return q k^T float32 [M, N] of queries [M, D] and keys [N, D]; a single query needs no tensor cores."""
    if q_tile.shape[0] == 1:
        return tl.sum(q_tile.to(tl.float32) * keys.to(tl.float32), 1)[None, :]
    else:
        return tl.dot(q_tile, tl.trans(keys), input_precision=PRECISION)


@triton.jit
def score_slots(
    q_tile, keys, step, slot, channel, fits, keep, seen,
    WHOLE_D: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the scores of one tile of stored keys, float32 [M, N].

    Unless the tile is `WHOLE`, only slots in `keep` [N] are read, and scores outside `seen` [M or 1, N] are -inf.
    """
    tile = load_tile(keys, step, slot, channel, fits, keep, WHOLE_D, WHOLE)
    scores = score_tile(q_tile, tile.to(q_tile.dtype), PRECISION)
    return scores if WHOLE else tl.where(seen, scores, float("-inf"))


@triton.jit
def add_scores(top, total, scores, scale, GUARD: tl.constexpr):
    """Advance the online softmax by one tile; return weights, decay of earlier tiles, largest score, sum of weights."""
    peak = tl.maximum(top, tl.max(scores, 1) * scale)
    if GUARD:  # queries without a visible key so far
        base = tl.where(peak == float("-inf"), 0.0, peak)
    else:
        base = peak
    weights = tl.exp2(scores * scale - base[:, None])
    decay = tl.exp2(top - base)
    return weights, decay, peak, total * decay + tl.sum(weights, 1)


@triton.jit
def add_tile(acc, top, total, scores, values, scale, GUARD: tl.constexpr, PRECISION: tl.constexpr):
    """Advance the online softmax by one tile; return weighted values, largest scaled score and sum of weights.

    A single query multiplies weights and values without tensor cores, in float32.
    """
    weights, decay, top, total = add_scores(top, total, scores, scale, GUARD)
    acc = acc * decay[:, None]
    if acc.shape[0] == 1:
        acc += tl.sum(tl.trans(weights) * values.to(tl.float32), 0)[None, :]
    else:
        acc = tl.dot(weights.to(values.dtype), values, acc, input_precision=PRECISION)
    return acc, top, total


@triton.jit
def attend_slots(
    acc, top, total, q_tile, keys, k_step, values, v_step, slot, channel, fits, keep, seen, scale,
    WHOLE_D: tl.constexpr, WHOLE: tl.constexpr, GUARD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend to one tile of stored keys and values; see `score_slots` and `add_tile`."""
    scores = score_slots(q_tile, keys, k_step, slot, channel, fits, keep, seen, WHOLE_D, WHOLE, PRECISION)
    tile = load_tile(values, v_step, slot, channel, fits, keep, WHOLE_D, WHOLE)
    return add_tile(acc, top, total, scores, tile.to(q_tile.dtype), scale, GUARD, PRECISION)


@triton.jit
def store_state(
    out, partial, lse, written, place, acc, top, total, inside, stored, channel, splits, HEAD_DIM: tl.constexpr
):  # fmt: skip
    """Store the log-sum-exp and the output of a state: the final one of one split, else an input of `merge_shares`."""
    total = tl.maximum(total, 1e-30)  # a split without keys leaves zeros and a weight of exp(-inf)
    tl.store(lse + place, (top + tl.log2(total)) * 0.6931471805599453, mask=inside)
    acc = acc / total[:, None]
    if splits == 1:
        tl.store(out + written, acc.to(out.dtype.element_ty), mask=stored)
    else:
        tl.store(partial + place[:, None] * HEAD_DIM + channel[None, :], acc, mask=stored)


@triton.jit
def locate_queries(rows, queries, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr):
    """Locate the queries of a program. Grid: query block, row, sequence.

    Returns:
        Query indices int64, row, sequence, channel indices, mask of queries, mask of the tile, and flat query indices.
    """
    query = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    channel = tl.arange(0, BLOCK_D)
    inside = query < queries
    stored = inside[:, None] & (channel < HEAD_DIM)[None, :]
    return query.to(tl.int64), row, batch, channel, inside, stored, (batch * rows + row) * queries + query


@kernel("partial_lse", "lse")
def merge_kernel(
    partial, partial_lse, out, lse,
    rows: tl.int32, queries: tl.int32, splits: tl.int32,
    out_b: tl.int64, out_r: tl.int64, out_t: tl.int64,
    UNIT: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Merge attention over splits of the keys, weighted by log-sum-exp. Grid: query block, row, sequence."""
    query, row, batch, channel, inside, stored, place = locate_queries(
        rows, queries, HEAD_DIM, BLOCK_D, BLOCK_M
    )
    step = tl.num_programs(2).to(tl.int64) * rows * queries
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for index in tl.range(0, splits):
        at = place + index * step
        one = tl.load(partial_lse + at, mask=inside, other=0.0)
        peak = tl.maximum(top, one)
        base = tl.where(peak == float("-inf"), 0.0, peak)
        decay = tl.exp(top - base)
        weight = tl.exp(one - base)
        values = tl.load(partial + at[:, None] * HEAD_DIM + channel[None, :], mask=stored, other=0.0)
        acc = acc * decay[:, None] + values * weight[:, None]
        total = total * decay + weight
        top = peak
    tl.store(lse + place, top + tl.log(total), mask=inside)
    out += (batch * out_b + row * out_r) * UNIT
    tl.store(
        out + query[:, None] * (out_t * UNIT) + channel[None, :],
        (acc / tl.where(total == 0.0, 1.0, total)[:, None]).to(out.dtype.element_ty),
        mask=stored,
    )


def merge_shares(partial: Tensor, lse: Tensor, out: Tensor) -> Tensor:
    """Merge attention over splits of the keys.

    Args:
        partial: float32 [S, B, R, M, D], contiguous.
        lse: their log-sum-exp, float32 [S, B, R, M]; -inf for a split without keys.
        out: [B, R, M, D], overwritten.

    Returns:
        The log-sum-exp over all keys, float32 [B, R, M].
    """
    share, batch, rows, queries, channels = partial.shape
    merged = torch.empty_like(lse[0])
    merge_kernel[cdiv(queries, 16), rows, batch](
        partial, lse, out, merged, rows, queries, share, *align_rows(out)[1],
        UNIT=find_unit(channels), HEAD_DIM=channels, BLOCK_D=max(16, next_power_of_2(channels)), BLOCK_M=16,
        enable_fp_fusion=True,
    )  # fmt: skip
    return merged


def finish_shares(partial: Tensor, lse: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp, merged if there are several splits; arguments are as in `merge_shares`."""
    return out, lse[0] if len(lse) == 1 else merge_shares(partial, lse, out)


@kernel("lse", "more_lse")
def pair_kernel(
    out, lse, more, more_lse,
    heads: tl.int32, queries: tl.int32,
    out_b: tl.int64, out_h: tl.int64, out_t: tl.int64, more_b: tl.int64, more_h: tl.int64, more_t: tl.int64,
    UNIT: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Merge a second state into the first one, in place. Grid: query block, head, sequence."""
    query, head, sequence, channel, inside, stored, place = locate_queries(
        heads, queries, HEAD_DIM, BLOCK_D, BLOCK_M
    )
    first = tl.load(lse + place, mask=inside, other=0.0)
    second = tl.load(more_lse + place, mask=inside, other=0.0)
    top = tl.maximum(first, second)
    top = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp(first - top)
    other = tl.exp(second - top)
    total = weight + other
    step = query[:, None] * UNIT
    out += (sequence * out_b + head * out_h) * UNIT + step * out_t + channel[None, :]
    more += (sequence * more_b + head * more_h) * UNIT + step * more_t + channel[None, :]
    acc = tl.load(out, mask=stored, other=0.0).to(tl.float32) * weight[:, None]
    acc += tl.load(more, mask=stored, other=0.0).to(tl.float32) * other[:, None]
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out, acc.to(out.dtype.element_ty), mask=stored)
    tl.store(lse + place, top + tl.log(total), mask=inside)


def merge_pair_triton(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Merge a second state into the first one, each [sequences, heads, queries, D] and [sequences, heads, queries].

    Outputs may have any strides and dtypes; both log-sum-exps are float32 and contiguous.
    """
    sequences, heads, queries, channels = out.shape
    more, more_strides = align_rows(more)
    pair_kernel[cdiv(queries, 16), heads, sequences](
        out, lse, more, more_lse, heads, queries, *align_rows(out)[1], *more_strides,
        UNIT=find_unit(channels), HEAD_DIM=channels, BLOCK_D=max(16, next_power_of_2(channels)), BLOCK_M=16,
        enable_fp_fusion=True,
    )  # fmt: skip
