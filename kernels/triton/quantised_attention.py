"""Attention over a plane of quantised keys and values (see `quantised_attention` in `kernels/quantised_attention.py`).

Codes become numbers in registers, tile by tile, on their way to the products: nothing but codes and tables is read from
memory. Keys that are yet to be rotated come as two half tiles, of the first and of the second part of every pair, so
that turning them moves nothing between threads, and their products with the queries are two.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.attention_states import State
from kvbench.kernels.batch_invariance import is_batch_invariant
from kvbench.kernels.planes import Codes, Plane
from kvbench.kernels.triton.codes import load_numbers, split_word
from kvbench.kernels.triton.launch import (
    LOG2_E,
    align_rows,
    cdiv,
    count_processors,
    has_small_memory,
    kernel,
    list_constants,
    make_partials,
    next_power_of_2,
)
from kvbench.kernels.triton.ragged_attention import Tile, make_output, splits
from kvbench.kernels.triton.softmax import add_tile, finish_shares, score_tile, store_state

WORDS = {torch.complex64: torch.int64, torch.complex32: torch.int32}
"""Integers as large as a rotation."""


def tile(head_dim: int, dtype: torch.dtype, queries: int, rows: int, device: torch.device) -> Tile:
    """Return the sizes for a head dim and dtype; arguments as of `ragged_attention.tile`."""
    wide = head_dim > 128
    less = wide and has_small_memory(device)
    if queries == 1:
        return Tile(1, 32, 4, 3 - less)
    if dtype == torch.float32:
        return Tile(16, 16 if wide else 32, 8, 2)
    if queries <= 16:  # with three tiles in flight turning keys of 128 channels spills
        return Tile(16, 32, 4, 3 if head_dim <= 64 else 2 - less)
    fills = is_batch_invariant() or rows * cdiv(queries, 128) >= 2 * count_processors(device)
    if wide or not fills:
        return Tile(64, 32, 8 if wide else 4, 2 - less)
    return Tile(128, 32, 8, 2)


class Source(NamedTuple):
    """Kernel arguments that describe a plane's keys or values.

    Attributes:
        tensors: numbers, table and entries; where one does not exist the numbers stand in and are not read.
        step: table elements of a sequence, 0 where one table is for all.
        scheme: `affine`, `book`, `float8` or `float`.
        entries: whether slots name their entry of the table.
        channels: of an entry that are stored, D or 1.
    """

    tensors: tuple[Tensor, Tensor, Tensor]
    step: int
    scheme: str
    entries: bool
    channels: int


def read_source(codes: Codes) -> Source:
    """Return what the kernel reads of codes; scale and zero are one word to it."""
    numbers, channels = codes.numbers, codes.numbers.shape[-1]
    if numbers.dtype == torch.float8_e4m3fn:
        numbers = numbers.view(torch.uint8)
    entry = numbers if codes.entry is None else codes.entry
    if codes.affine is not None:
        words = codes.affine.view(torch.int32)
        step = words[0].numel() if len(words) > 1 else 0
        return Source((numbers, words, entry), step, "affine", codes.entry is not None, words.shape[2])
    if codes.book is not None:
        return Source((numbers, codes.book, entry), 0, "book", True, codes.book.shape[1])
    scheme = "float8" if numbers.dtype == torch.uint8 else "float"
    return Source((numbers, numbers, numbers), 0, scheme, False, channels)


def list_formats(plane: Plane) -> dict[str, int | bool | str]:
    """Return what the kernel is compiled for of a plane."""
    keys, values = read_source(plane.keys), read_source(plane.values)
    return {
        "BITS": plane.bits, "ROTATE": plane.rotation is not None,
        "KEYS": keys.scheme, "KEY_ENTRIES": keys.entries, "KEY_CHANNELS": keys.channels,
        "VALUES": values.scheme, "VALUE_ENTRIES": values.entries, "VALUE_CHANNELS": values.channels,
    }  # fmt: skip


@triton.jit
def attend_codes(
    acc, top, total, asked, other, keys, key_table, key_entry, values, value_table, value_entry,
    rotation, positions, slot, seen, scale,
    WHOLE: tl.constexpr, BITS: tl.constexpr,
    KEYS: tl.constexpr, KEY_ENTRIES: tl.constexpr, KEY_CHANNELS: tl.constexpr,
    VALUES: tl.constexpr, VALUE_ENTRIES: tl.constexpr, VALUE_CHANNELS: tl.constexpr,
    ROTATE: tl.constexpr, HEAD_DIM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of a row's slots, unless `WHOLE` those `seen`; keys that turn are scored in halves: `asked`, `other`."""
    lane = tl.arange(0, asked.shape[1])
    first = load_numbers(
        keys, key_table, key_entry, slot, lane, KEYS, KEY_ENTRIES, KEY_CHANNELS, BITS, HEAD_DIM
    )
    if ROTATE:
        HALF: tl.constexpr = HEAD_DIM // 2
        second = load_numbers(
            keys, key_table, key_entry, slot, lane + HALF, KEYS, KEY_ENTRIES, KEY_CHANNELS, BITS, HEAD_DIM
        )
        place = tl.load(positions + slot)[:, None] * HALF + (lane % HALF)[None, :]
        cos, sin = split_word(tl.load(rotation + place))
        turned = (first * cos - second * sin).to(asked.dtype)
        second = (first * sin + second * cos).to(asked.dtype)
        scores = score_tile(asked, turned, PRECISION) + score_tile(other, second, PRECISION)
    else:
        scores = score_tile(asked, first.to(asked.dtype), PRECISION)
    if not WHOLE:
        scores = tl.where(seen[None, :], scores, float("-inf"))
    channel = tl.arange(0, acc.shape[1])
    weighed = load_numbers(
        values, value_table, value_entry, slot, channel, VALUES, VALUE_ENTRIES, VALUE_CHANNELS, BITS, HEAD_DIM
    )
    return add_tile(acc, top, total, scores, weighed.to(asked.dtype), scale, False, PRECISION)


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
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, BITS: tl.constexpr,
    KEYS: tl.constexpr, KEY_ENTRIES: tl.constexpr, KEY_CHANNELS: tl.constexpr, VALUES: tl.constexpr,
    VALUE_ENTRIES: tl.constexpr, VALUE_CHANNELS: tl.constexpr, ROTATE: tl.constexpr, RESUME: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Query block (fastest), sequence and share of the keys, rank of the row by length (slowest).

    Strides of q and out count `UNIT` elements, those of tables entries; `scale` includes log2(e); sequences beyond the
    `stored` ones read those again. With one split `out` and `lse` are final, else `partial` float32
    [splits, batch, rows, queries, D] and `lse` [splits, batch, rows, queries] are for `softmax.merge_kernel`. To
    resume, `out` and `state` float32 [batch, rows, queries] hold what other keys came to, which the first share takes
    in.
    """
    row = tl.load(order + tl.program_id(2)).to(tl.int64)
    batch = (tl.program_id(1) // splits).to(tl.int64)
    part = tl.program_id(1) % splits
    length = tl.load(lengths + row)
    query = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    channel = tl.arange(0, BLOCK_D)
    lane = tl.arange(0, BLOCK_N)
    asks = query < queries
    inside = asks[:, None] & (channel < HEAD_DIM)[None, :]

    q += (batch * q_b + row * q_r) * UNIT
    place = query.to(tl.int64)[:, None] * (q_t * UNIT)
    if ROTATE:
        pair = tl.arange(0, BLOCK_H)
        whole_pair = asks[:, None] & (pair < HEAD_DIM // 2)[None, :]
        asked = tl.load(q + place + 2 * pair[None, :], mask=whole_pair, other=0.0)
        other = tl.load(q + place + 2 * pair[None, :] + 1, mask=whole_pair, other=0.0)
    else:
        asked = tl.load(q + place + channel[None, :], mask=inside, other=0.0)
        other = asked

    first = tl.load(offsets + row)
    held = batch % stored
    keys += (held * slots + first) * (HEAD_DIM * BITS // 8 if KEYS != "float" else HEAD_DIM)
    values += (held * slots + first) * (HEAD_DIM * BITS // 8 if VALUES != "float" else HEAD_DIM)
    key_table += held * key_step
    value_table += held * value_step
    key_entry += first
    value_entry += first
    positions += first
    if not KEY_ENTRIES:
        key_table += first * KEY_CHANNELS
    if not VALUE_ENTRIES:
        value_table += first * VALUE_CHANNELS

    batches = tl.num_programs(1) // splits
    mine = (batch * rows + row) * queries + query
    out += (batch * out_b + row * out_r) * UNIT
    out_place = query.to(tl.int64)[:, None] * (out_t * UNIT) + channel[None, :]
    total = tl.zeros([BLOCK_M], tl.float32)
    if RESUME:
        begins = query < tl.where(part == 0, queries, 0)
        top = tl.load(state + mine, mask=begins, other=float("-inf")) * 1.4426950408889634
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
            acc, top, total, asked, other, keys, key_table, key_entry, values, value_table, value_entry,
            rotation, positions, index * BLOCK_N + lane, None, scale, True, BITS, KEYS, KEY_ENTRIES, KEY_CHANNELS,
            VALUES, VALUE_ENTRIES, VALUE_CHANNELS, ROTATE, HEAD_DIM, PRECISION,
        )  # fmt: skip
    if (whole * BLOCK_N < length) & (begin <= whole) & (whole < end):
        slot = whole * BLOCK_N + lane
        acc, top, total = attend_codes(
            acc, top, total, asked, other, keys, key_table, key_entry, values, value_table, value_entry,
            rotation, positions, tl.minimum(slot, length - 1), slot < length, scale, False, BITS, KEYS, KEY_ENTRIES,
            KEY_CHANNELS, VALUES, VALUE_ENTRIES, VALUE_CHANNELS, ROTATE, HEAD_DIM, PRECISION,
        )  # fmt: skip

    mine += part * (batches * rows * queries).to(tl.int64)
    store_state(out, partial, lse, out_place, mine, acc, top, total, asks, inside, channel, splits, HEAD_DIM)


def quantised_attention_triton(
    q: Tensor, plane: Plane, scale: float, state: State | None = None, *, share: int | None = None
) -> State:
    """Take and return what `kernels.quantised_attention.quantised_attention` does; the plane's tensors are contiguous.

    `share` programs share a row's keys; None: as many as fill the device.
    """
    batch, rows, queries, channels = q.shape
    layout = plane.layout
    q, q_strides = align_rows(q)
    out = make_output(q) if state is None else state[0]
    sizes = tile(channels, q.dtype, queries, batch * rows, q.device)
    blocks = cdiv(queries, sizes.queries)
    if share is None:
        share = splits(batch * rows * blocks, layout.longest, sizes, q.device)
    partial, lse = make_partials(q, share, None if state is None else state[1])
    keys, values = read_source(plane.keys), read_source(plane.values)
    rotation = plane.positions
    if plane.rotation is not None:
        rotation = plane.rotation.view(WORDS[plane.rotation.dtype])
    quantised_kernel[blocks, batch * share, rows](
        q, *keys.tensors, *values.tensors, rotation, plane.positions,
        out, partial, lse if state is None else state[1], lse,
        layout.offsets, layout.lengths, layout.order, scale * LOG2_E,
        rows, queries, layout.total, share, len(plane.keys.numbers), keys.step, values.step,
        *q_strides, *align_rows(out)[1],
        **list_constants(q), BLOCK_H=max(16, next_power_of_2(channels // 2)), BLOCK_M=sizes.queries, BLOCK_N=sizes.keys,
        STAGES=sizes.stages, **list_formats(plane), RESUME=state is not None,
        num_warps=sizes.warps, num_stages=sizes.stages,
    )  # fmt: skip
    return finish_shares(partial, lse, out)
