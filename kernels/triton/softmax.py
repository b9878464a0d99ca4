"""Online softmax in base 2: one tile of keys after the other, and attentions over shares of the keys made one."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.triton.launch import UNIT, align_rows, cdiv, kernel, load_tile, next_power_of_2


@triton.jit
def score_tile(asked, keys, PRECISION: tl.constexpr):
    """Products of queries [M, D] and keys [N, D], float32 [M, N]; a single query needs no matrix units."""
    if asked.shape[0] == 1:
        return tl.sum(asked.to(tl.float32) * keys.to(tl.float32), 1)[None, :]
    else:
        return tl.dot(asked, tl.trans(keys), input_precision=PRECISION)


@triton.jit
def score_slots(
    asked, keys, step, slot, channel, fits, keep, seen,
    WHOLE_D: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores of one tile of stored keys, float32 [M, N]; unless it is `WHOLE`, slots are read where `keep`.

    What is not `seen` [M or 1, N] has a score of -inf.
    """
    tile = load_tile(keys, step, slot, channel, fits, keep, WHOLE_D, WHOLE)
    scores = score_tile(asked, tile.to(asked.dtype), PRECISION)
    return scores if WHOLE else tl.where(seen, scores, float("-inf"))


@triton.jit
def add_scores(top, total, scores, scale, GUARD: tl.constexpr):
    """One tile of the online softmax: weights, factor on what came before, largest scaled score, sum of weights."""
    peak = tl.maximum(top, tl.max(scores, 1) * scale)
    if GUARD:  # rows that have seen nothing yet
        base = tl.where(peak == float("-inf"), 0.0, peak)
    else:
        base = peak
    weights = tl.exp2(scores * scale - base[:, None])
    decay = tl.exp2(top - base)
    return weights, decay, peak, total * decay + tl.sum(weights, 1)


@triton.jit
def add_tile(acc, top, total, scores, values, scale, GUARD: tl.constexpr, PRECISION: tl.constexpr):
    """One tile of the online softmax: weighted values, largest scaled score so far, sum of weights.

    A single query's weights meet the values without matrix units, in float32.
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
    acc, top, total, asked, keys, k_step, values, v_step, slot, channel, fits, keep, seen, scale,
    WHOLE_D: tl.constexpr, WHOLE: tl.constexpr, GUARD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of stored keys and values; see `score_slots` and `add_tile`."""
    scores = score_slots(asked, keys, k_step, slot, channel, fits, keep, seen, WHOLE_D, WHOLE, PRECISION)
    tile = load_tile(values, v_step, slot, channel, fits, keep, WHOLE_D, WHOLE)
    return add_tile(acc, top, total, scores, tile.to(asked.dtype), scale, GUARD, PRECISION)


@triton.jit
def store_state(
    out, partial, lse, written, place, acc, top, total, inside, stored, channel, splits, HEAD_DIM: tl.constexpr
):  # fmt: skip
    """Store an attention: with one split as the final output at `written`, else as a share at `place`."""
    total = tl.maximum(total, 1e-30)  # a share without keys leaves zeros and a weight of exp(-inf)
    tl.store(lse + place, (top + tl.log2(total)) * 0.6931471805599453, mask=inside)
    acc = acc / total[:, None]
    if splits == 1:
        tl.store(out + written, acc.to(out.dtype.element_ty), mask=stored)
    else:
        tl.store(partial + place[:, None] * HEAD_DIM + channel[None, :], acc, mask=stored)


@triton.jit
def locate_queries(rows, queries, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr):
    """Queries of a program (query block, row, sequence).

    Returns:
        Queries int64, row, sequence, channels, whether queries exist, whether numbers do, and the queries' places.
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
    """Query block, row, sequence: attentions over shares of the keys into one, weighted by their log-sum-exp."""
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
    """Merge attentions over shares of the keys.

    Args:
        partial: float32 [shares, batch, rows, queries, D], contiguous.
        lse: their log-sum-exp, float32 [shares, batch, rows, queries]; a share without keys has -inf.
        out: [batch, rows, queries, D], written to.

    Returns:
        The log-sum-exp over all keys, float32 [batch, rows, queries].
    """
    share, batch, rows, queries, channels = partial.shape
    merged = torch.empty_like(lse[0])
    merge_kernel[cdiv(queries, 16), rows, batch](
        partial, lse, out, merged, rows, queries, share, *align_rows(out)[1],
        UNIT=UNIT, HEAD_DIM=channels, BLOCK_D=max(16, next_power_of_2(channels)), BLOCK_M=16,
        enable_fp_fusion=True,
    )  # fmt: skip
    return merged


def finish_shares(partial: Tensor, lse: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of programs that shared rows' keys; arguments as of `merge_shares`."""
    return out, lse[0] if len(lse) == 1 else merge_shares(partial, lse, out)


@kernel("lse", "more_lse")
def pair_kernel(
    out, lse, more, more_lse,
    heads: tl.int32, queries: tl.int32,
    out_b: tl.int64, out_h: tl.int64, out_t: tl.int64, more_b: tl.int64, more_h: tl.int64, more_t: tl.int64,
    UNIT: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Query block, head, sequence: a second attention taken into the first one, in place."""
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
    """Take a second attention into the first one, [sequences, heads, queries, D] and [sequences, heads, queries] each.

    Outputs may have any strides and dtypes, both log-sum-exps are float32 and contiguous.
    """
    sequences, heads, queries, channels = out.shape
    more, more_strides = align_rows(more)
    pair_kernel[cdiv(queries, 16), heads, sequences](
        out, lse, more, more_lse, heads, queries, *align_rows(out)[1], *more_strides,
        UNIT=UNIT, HEAD_DIM=channels, BLOCK_D=max(16, next_power_of_2(channels)), BLOCK_M=16,
        enable_fp_fusion=True,
    )  # fmt: skip
