"""Attention over a plane of quantised keys and values (see `quantised_attention` in `kernels/quantised_attention.py`).

Codes are decoded in registers, tile by tile: only codes and tables are read from memory. Unrotated keys are loaded as
two half tiles, the even and the odd channels of all pairs, so that rotation moves nothing between threads; each half
has its own product with the queries.

Shapes: B batch, R rows, M queries, N keys of a tile, D channels, S splits of a row's keys.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.layout import State
from kvbench.kernels.planes import Codes, Plane
from kvbench.kernels.triton.codes import load_numbers, split_word
from kvbench.kernels.triton.launch import (
    LOG2_E,
    align_rows,
    cdiv,
    kernel,
    list_constants,
    locate_row,
    make_partials,
    next_power_of_2,
)
from kvbench.kernels.triton.ragged_attention import make_output
from kvbench.kernels.triton.softmax import add_tile, finish_shares, score_tile, store_state
from kvbench.kernels.triton.tiles import choose_tile, count_splits

ROTATION_WORDS = {torch.complex64: torch.int64, torch.complex32: torch.int32}
"""Integer dtypes of the size of a rotation."""


class CodeArguments(NamedTuple):
    """Kernel arguments for a plane's keys or values.

    Attributes:
        tensors: `Codes.data`, table and entries, or `Codes.data`, gains and levels; absent tensors are replaced by the
            data and not read.
        step: table elements per sequence, 0 if sequences share a table.
        scheme: `affine`, `codebook`, `levels`, `float8` or `float`.
        entries: whether there is a table entry index for each slot.
        channels: stored channels of an entry, D or 1.
    """

    tensors: tuple[Tensor, Tensor, Tensor]
    step: int
    scheme: str
    entries: bool
    channels: int


def list_arguments(codes: Codes) -> CodeArguments:
    """Return the kernel arguments for codes; scale and zero are viewed as one word."""
    data, channels = codes.data, codes.data.shape[-1]
    if data.dtype == torch.float8_e4m3fn:
        data = data.view(torch.uint8)
    entry = data if codes.entry is None else codes.entry
    if codes.gain is not None:
        assert codes.codebook is not None
        return CodeArguments((data, codes.gain, codes.codebook), codes.gain.shape[1], "levels", False, 1)
    if codes.affine is not None:
        words = codes.affine.view(torch.int32)
        step = words[0].numel() if len(words) > 1 else 0
        return CodeArguments((data, words, entry), step, "affine", codes.entry is not None, words.shape[2])
    if codes.codebook is not None:
        return CodeArguments((data, codes.codebook, entry), 0, "codebook", True, codes.codebook.shape[1])
    scheme = "float8" if data.dtype == torch.uint8 else "float"
    return CodeArguments((data, data, data), 0, scheme, False, channels)


@triton.jit
def attend_codes(
    acc, top, total, q_tile, q_odd, keys, key_table, key_entry, values, value_table, value_entry,
    rotation, positions, slot, seen, scale,
    WHOLE: tl.constexpr, KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr,
    KEYS: tl.constexpr, KEY_ENTRIES: tl.constexpr, KEY_CHANNELS: tl.constexpr,
    VALUES: tl.constexpr, VALUE_ENTRIES: tl.constexpr, VALUE_CHANNELS: tl.constexpr,
    ROTATE: tl.constexpr, HEAD_DIM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend to one tile of a row's slots, `seen` ones unless `WHOLE`; `q_tile` and `q_odd` score rotated halves."""
    lane = tl.arange(0, q_tile.shape[1])
    first = load_numbers(
        keys, key_table, key_entry, slot, lane, KEYS, KEY_ENTRIES, KEY_CHANNELS, KEY_BITS, HEAD_DIM
    )
    if ROTATE:
        HALF: tl.constexpr = HEAD_DIM // 2
        second = load_numbers(
            keys, key_table, key_entry, slot, lane + HALF, KEYS, KEY_ENTRIES, KEY_CHANNELS, KEY_BITS, HEAD_DIM
        )
        place = tl.load(positions + slot)[:, None] * HALF + (lane % HALF)[None, :]
        cos, sin = split_word(tl.load(rotation + place))
        rotated = (first * cos - second * sin).to(q_tile.dtype)
        second = (first * sin + second * cos).to(q_tile.dtype)
        scores = score_tile(q_tile, rotated, PRECISION) + score_tile(q_odd, second, PRECISION)
    else:
        scores = score_tile(q_tile, first.to(q_tile.dtype), PRECISION)
    if not WHOLE:
        scores = tl.where(seen[None, :], scores, float("-inf"))
    channel = tl.arange(0, acc.shape[1])
    value_tile = load_numbers(
        values, value_table, value_entry, slot, channel, VALUES, VALUE_ENTRIES, VALUE_CHANNELS, VALUE_BITS, HEAD_DIM
    )  # fmt: skip
    return add_tile(acc, top, total, scores, value_tile.to(q_tile.dtype), scale, False, PRECISION)


@kernel(
    "key_table", "key_entry", "value_table", "value_entry", "rotation", "positions", "state", "lse",
    "offsets", "lengths", "order",
)  # fmt: skip
def quantised_kernel(
    q, keys, key_table, key_entry, values, value_table, value_entry, rotation, positions,
    out, partial, state, lse, offsets, lengths, order,
    scale: tl.float32, rows: tl.int32, queries: tl.int32, slots: tl.int64, splits: tl.int32, stored: tl.int32,
    key_step: tl.int64, value_step: tl.int64,
    q_b: tl.int64, q_r: tl.int64, q_t: tl.int64, out_b: tl.int64, out_r: tl.int64, out_t: tl.int64,
    UNIT: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr,
    KEYS: tl.constexpr, KEY_ENTRIES: tl.constexpr, KEY_CHANNELS: tl.constexpr, VALUES: tl.constexpr,
    VALUE_ENTRIES: tl.constexpr, VALUE_CHANNELS: tl.constexpr, ROTATE: tl.constexpr, RESUME: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend. Grid: query block (fastest), sequence and split of the keys, rank of the row by length (slowest).

    Strides of q and out count `UNIT` elements, strides of tables count entries; `scale` includes log2(e); sequence b
    reads sequence b % `stored`. With RESUME the first split starts from the state in `out` and `state` float32
    [B, R, M]. `softmax.store_state` stores the results.
    """
    row, batch, part, _sequence, _head, length = locate_row(order, lengths, rows, splits)
    query = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    channel = tl.arange(0, BLOCK_D)
    lane = tl.arange(0, BLOCK_N)
    in_range = query < queries
    inside = in_range[:, None] & (channel < HEAD_DIM)[None, :]

    q += (batch * q_b + row * q_r) * UNIT
    place = query.to(tl.int64)[:, None] * (q_t * UNIT)
    if ROTATE:
        pair = tl.arange(0, BLOCK_H)
        whole_pair = in_range[:, None] & (pair < HEAD_DIM // 2)[None, :]
        q_tile = tl.load(q + place + 2 * pair[None, :], mask=whole_pair, other=0.0)
        q_odd = tl.load(q + place + 2 * pair[None, :] + 1, mask=whole_pair, other=0.0)
    else:
        q_tile = tl.load(q + place + channel[None, :], mask=inside, other=0.0)
        q_odd = q_tile

    first = tl.load(offsets + row)
    source = batch % stored
    keys += (source * slots + first) * (HEAD_DIM * KEY_BITS // 8 if KEYS != "float" else HEAD_DIM)
    values += (source * slots + first) * (HEAD_DIM * VALUE_BITS // 8 if VALUES != "float" else HEAD_DIM)
    key_table += source * key_step
    value_table += source * value_step
    positions += first
    if KEY_ENTRIES:
        key_entry += first
    else:
        key_table += first * KEY_CHANNELS
    if VALUE_ENTRIES:
        value_entry += first
    else:
        value_table += first * VALUE_CHANNELS

    batches = tl.num_programs(1) // splits
    state_place = (batch * rows + row) * queries + query
    out += (batch * out_b + row * out_r) * UNIT
    out_place = query.to(tl.int64)[:, None] * (out_t * UNIT) + channel[None, :]
    total = tl.zeros([BLOCK_M], tl.float32)
    if RESUME:
        begins = query < tl.where(part == 0, queries, 0)
        top = tl.load(state + state_place, mask=begins, other=float("-inf")) * 1.4426950408889634
        total = tl.where(top == float("-inf"), 0.0, 1.0)
        started = begins[:, None] & (channel < HEAD_DIM)[None, :]
        acc = tl.load(out + out_place, mask=started, other=0.0).to(tl.float32)
    else:
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    whole = length // BLOCK_N
    share = tl.cdiv(tl.cdiv(length, BLOCK_N), splits)
    begin = part * share
    end = begin + share
    for index in tl.range(tl.minimum(begin, whole), tl.minimum(end, whole), num_stages=STAGES):
        acc, top, total = attend_codes(
            acc, top, total, q_tile, q_odd, keys, key_table, key_entry, values, value_table, value_entry,
            rotation, positions, index * BLOCK_N + lane, None, scale, True, KEY_BITS, VALUE_BITS, KEYS, KEY_ENTRIES,
            KEY_CHANNELS, VALUES, VALUE_ENTRIES, VALUE_CHANNELS, ROTATE, HEAD_DIM, PRECISION,
        )  # fmt: skip
    if (whole * BLOCK_N < length) & (begin <= whole) & (whole < end):
        slot = whole * BLOCK_N + lane
        acc, top, total = attend_codes(
            acc, top, total, q_tile, q_odd, keys, key_table, key_entry, values, value_table, value_entry,
            rotation, positions, tl.minimum(slot, length - 1), slot < length, scale, False, KEY_BITS, VALUE_BITS,
            KEYS, KEY_ENTRIES, KEY_CHANNELS, VALUES, VALUE_ENTRIES, VALUE_CHANNELS, ROTATE, HEAD_DIM, PRECISION,
        )  # fmt: skip

    state_place += part * (batches * rows * queries).to(tl.int64)
    store_state(
        out, partial, lse, out_place, state_place, acc, top, total, in_range, inside, channel, splits, HEAD_DIM
    )  # fmt: skip


def quantised_attention_triton(
    q: Tensor, plane: Plane, scale: float, state: State | None = None, dtype: torch.dtype | None = None
) -> State:
    """Compute `kernels.quantised_attention.quantised_attention` on a GPU; the plane's tensors are contiguous.

    Without a state, the output has `dtype`, or q's.
    """
    batch, rows, queries, channels = q.shape
    layout = plane.layout
    q, q_strides = align_rows(q)
    out = make_output(q, dtype) if state is None else state[0]
    sizes = choose_tile("quantised", channels, q.dtype, queries, batch * rows, q.device)
    blocks = cdiv(queries, sizes.queries)
    share = count_splits(batch * rows * blocks, layout.longest, sizes, q.device)
    partial, lse = make_partials(q, share, None if state is None else state[1])
    keys, values = list_arguments(plane.keys), list_arguments(plane.values)
    rotation = plane.positions
    if plane.rotation is not None:
        rotation = plane.rotation.view(ROTATION_WORDS[plane.rotation.dtype])
    quantised_kernel[blocks, batch * share, rows](
        q, *keys.tensors, *values.tensors, rotation, plane.positions,
        out, partial, lse if state is None else state[1], lse,
        layout.offsets, layout.lengths, layout.order, scale * LOG2_E,
        rows, queries, layout.total, share, len(plane.keys.data), keys.step, values.step,
        *q_strides, *align_rows(out)[1],
        **list_constants(q), BLOCK_H=max(16, next_power_of_2(channels // 2)), BLOCK_M=sizes.queries, BLOCK_N=sizes.keys,
        STAGES=sizes.stages, KEY_BITS=plane.key_bits, VALUE_BITS=plane.value_bits,
        KEYS=keys.scheme, KEY_ENTRIES=keys.entries, KEY_CHANNELS=keys.channels,
        VALUES=values.scheme, VALUE_ENTRIES=values.entries, VALUE_CHANNELS=values.channels,
        ROTATE=plane.rotation is not None, RESUME=state is not None,
        num_warps=sizes.warps, num_stages=sizes.stages,
    )  # fmt: skip
    return finish_shares(partial, lse, out)
