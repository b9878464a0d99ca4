"""Decoding of tiles of codes (packed as in `kernels/quantise.py`), for kernels that read planes.

Loads have no masks: channels past D wrap around, so that padding is finite, and the caller keeps slots inside a row.
"""

import triton
import triton.language as tl


@triton.jit
def load_codes(numbers, slot, channel, BITS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Load codes int32 [slots, channels] of one row; codes of three bits have a part of two bits and a part of one."""
    row = numbers + slot[:, None] * (HEAD_DIM * BITS // 8)
    if BITS == 3:
        high = _load_part(row + HEAD_DIM // 4, channel, 1, HEAD_DIM)
        return _load_part(row, channel, 2, HEAD_DIM) | (high << 2)
    else:
        return _load_part(row, channel, BITS, HEAD_DIM)


@triton.jit
def _load_part(row, channel, BITS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Load codes of 1, 2, 4 or 8 bits: channel c is in byte c % WIDTH, from bit c // WIDTH * BITS up."""
    WIDTH: tl.constexpr = HEAD_DIM * BITS // 8
    byte = tl.load(row + (channel % WIDTH)[None, :]).to(tl.int32)
    if BITS == 8:
        return byte
    else:
        return (byte >> (channel // WIDTH * BITS % 8)[None, :]) & ((1 << BITS) - 1)


@triton.jit
def split_word(word):
    """Split 32-bit integers into two float16, 64-bit integers into two float32; return both halves as float32."""
    if word.dtype == tl.int32:
        low = (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
        high = ((word >> 16) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
        return low.to(tl.float32), high.to(tl.float32)
    else:
        low = (word & 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True)
        high = ((word >> 32) & 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True)
        return low, high


@triton.jit
def load_numbers(
    numbers, table, entry, slot, channel,
    SCHEME: tl.constexpr, ENTRIES: tl.constexpr, CHANNELS: tl.constexpr,
    BITS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Load and decode numbers of one row, float32 [slots, channels].

    Args:
        numbers: pointer to the row's first slot, see `kernels.planes.Codes`.
        table: for `affine` int32 [entries, CHANNELS], scale and zero in one word; for `codebook` float16
            [entries, D, 2^BITS]; for `levels` float16 [slots], the gains; otherwise not read.
        entry: int32, entry of each slot if ENTRIES; `affine` without ENTRIES has one entry per slot. For `levels`
            float32 [2^BITS], the levels.
        slot: int32 [slots], inside the row.
        channel: int32 [channels], in storage order.
        SCHEME: `affine`, `codebook`, `levels`, `float8` (bytes of e4m3) or `float`.
        ENTRIES: see `entry`.
        CHANNELS: D, or 1 if all channels of a slot share scale and zero.
        BITS: bits of a number.
        HEAD_DIM: D.
    """
    place = (channel % HEAD_DIM)[None, :]
    if SCHEME == "float":
        return tl.load(numbers + (slot[:, None] * HEAD_DIM + place)).to(tl.float32)
    else:
        code = load_codes(numbers, slot, channel, BITS, HEAD_DIM)
        if SCHEME == "float8":
            # Move exponent and mantissa to their places in float16; its exponent bias is larger by 8.
            half = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
            return half.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 256
        elif SCHEME == "levels":
            return tl.load(entry + code) * tl.load(table + slot).to(tl.float32)[:, None]
        else:
            if ENTRIES:
                slot = tl.load(entry + slot)
            if SCHEME == "codebook":
                at = ((slot[:, None] * HEAD_DIM + place) << BITS) + code
                return tl.load(table + at).to(tl.float32)
            elif CHANNELS == 1:
                scale, zero = split_word(tl.load(table + slot))
                return code.to(tl.float32) * scale[:, None] + zero[:, None]
            else:
                scale, zero = split_word(tl.load(table + (slot[:, None] * HEAD_DIM + place)))
                return code.to(tl.float32) * scale + zero
