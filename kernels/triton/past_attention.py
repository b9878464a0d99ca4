"""Attention over the cached slots, optionally resumed from attention over other keys (see `attend_past`).

Tensor descriptors load tiles of keys and values: the copy engine computes addresses, for which pointers would need
registers. The online softmax starts from the given state, so that merging needs no launch and no second output. With
few queries, several programs split the keys of a row.

Shapes: B batch, R rows, M queries, N keys of a tile, D channels, S splits of a row's keys.
"""

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kvbench.kernels.layout import Past, State
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
from kvbench.kernels.triton.ragged_attention import make_output
from kvbench.kernels.triton.softmax import add_tile, finish_shares, store_state
from kvbench.kernels.triton.tiles import choose_tile, count_splits, fit_keys


@kernel("lse", "offsets", "lengths", "order")
def past_kernel(
    q, past_keys, past_values, out, partial, state, lse, offsets, lengths, order,
    scale: tl.float32, heads: tl.int32, rows: tl.int32, queries: tl.int32, slots: tl.int64, splits: tl.int32,
    q_b: tl.int64, q_r: tl.int64, q_t: tl.int64, out_b: tl.int64, out_r: tl.int64, out_t: tl.int64,
    UNIT: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, RESUME: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend. Grid: query block (fastest), sequence and split of the keys, rank of the row by length (slowest).

    `past_keys` and `past_values` are descriptors of all slots of all sequences, [B slots, D]. Strides count `UNIT`
    elements; `scale` includes log2(e). With RESUME the first split starts from the state in `out` and `state` float32
    [B, R, M]. `softmax.store_state` stores the results.
    """
    row, batch, part, sequence, head, length = locate_row(order, lengths, heads, splits)
    query, inside, channel, fits, q_tile = load_queries(
        q, q_b, q_r, q_t, sequence, head, queries, UNIT, HEAD_DIM, BLOCK_D, BLOCK_M
    )
    slot = tl.arange(0, BLOCK_N)
    stored = inside[:, None] & fits[None, :]
    start = (batch * slots + tl.load(offsets + row)).to(tl.int32)
    out += (sequence * out_b + head * out_r) * UNIT
    written = query.to(tl.int64)[:, None] * (out_t * UNIT) + channel[None, :]

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if RESUME and part == 0:
        known = tl.load(state + (batch * rows + row) * queries + query, mask=inside, other=float("-inf"))
        top = known * 1.4426950408889634
        total = tl.where(known == float("-inf"), 0.0, 1.0)
        acc = tl.load(out + written, mask=stored, other=0.0).to(tl.float32)

    tiles = tl.cdiv(length, BLOCK_N)
    share = tl.cdiv(tiles, splits)
    begin = part * share
    end = begin + share
    whole = length // BLOCK_N
    for index in tl.range(tl.minimum(begin, whole), tl.minimum(end, whole)):
        keys = past_keys.load([start + index * BLOCK_N, 0]).to(q.dtype.element_ty)
        scores = tl.dot(q_tile, keys.T, input_precision=PRECISION)
        values = past_values.load([start + index * BLOCK_N, 0]).to(q.dtype.element_ty)
        acc, top, total = add_tile(acc, top, total, scores, values, scale, False, PRECISION)
    for index in tl.range(tl.maximum(begin, whole), tl.minimum(end, tiles), num_stages=1):
        # Slots past the end of the row belong to another row and get no weight.
        keep = index * BLOCK_N + slot < length
        keys = past_keys.load([start + index * BLOCK_N, 0]).to(q.dtype.element_ty)
        scores = tl.dot(q_tile, keys.T, input_precision=PRECISION)
        scores = tl.where(keep[None, :], scores, float("-inf"))
        values = past_values.load([start + index * BLOCK_N, 0]).to(q.dtype.element_ty)
        acc, top, total = add_tile(acc, top, total, scores, values, scale, False, PRECISION)

    batches = tl.num_programs(1) // splits
    place = ((part * batches + batch) * rows + row) * queries + query
    store_state(out, partial, lse, written, place, acc, top, total, inside, stored, channel, splits, HEAD_DIM)


def past_attention_triton(q: Tensor, past: Past, scale: float, state: State | None = None) -> State:
    """Compute `kernels.past_attention.attend_past` on a GPU, for at least one slot."""
    sequences, heads, queries, channels = q.shape
    layout = past.layout
    batch, slots, _ = past.keys.shape
    rows = sequences * heads // batch
    q, q_strides = align_rows(q)
    sizes = choose_tile("past", channels, q.dtype, queries, batch * rows, q.device)
    sizes = sizes.with_keys(fit_keys(layout, 0, sizes.keys))
    blocks = cdiv(queries, sizes.queries)
    share = count_splits(batch * rows * blocks, layout.longest, sizes, q.device)
    out = make_output(q, torch.float32) if state is None else state[0]
    partial, lse = make_partials(q, share, None if state is None else state[1])
    constants = list_constants(q)
    tiles = [
        TensorDescriptor(x, [batch * slots, channels], [channels, 1], [sizes.keys, constants["BLOCK_D"]])
        for x in past[:2]
    ]
    past_kernel[blocks, batch * share, rows](
        q, *tiles, out, partial, lse if state is None else state[1], lse,
        layout.offsets, layout.lengths, layout.order, scale * LOG2_E,
        heads, rows, queries, slots, share, *q_strides, *align_rows(out)[1],
        **constants, BLOCK_M=sizes.queries, BLOCK_N=sizes.keys, RESUME=state is not None,
        num_warps=sizes.warps, num_stages=sizes.stages,
    )  # fmt: skip
    return finish_shares(partial, lse, out)
