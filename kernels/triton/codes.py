"""Tiles of numbers out of codes (how these lie in bytes: `kernels/quantise.py`), for kernels that read planes.

Nothing is masked: channels beyond the head wrap around, so that what pads a tile is finite, and slots are the caller's
to keep inside a row.
"""

import triton
import triton.language as tl


@triton.jit
def load_codes(numbers, slot, channel, BITS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Load codes int32 [slots, channels] of one row; those of three bits are a part of two and a part of one."""
    row = numbers + slot[:, None] * (HEAD_DIM * BITS // 8)
    if BITS == 3:
        high = _load_part(row + HEAD_DIM // 4, channel, 1, HEAD_DIM)
        return _load_part(row, channel, 2, HEAD_DIM) | (high << 2)
    else:
        return _load_part(row, channel, BITS, HEAD_DIM)


@triton.jit
def _load_part(row, channel, BITS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Codes of 1, 2, 4 or 8 bits: of W bytes, channel c is in byte c % W, from bit c // W BITS up."""
    WIDTH: tl.constexpr = HEAD_DIM * BITS // 8
    byte = tl.load(row + (channel % WIDTH)[None, :]).to(tl.int32)
    if BITS == 8:
        return byte
    else:
        return (byte >> (channel // WIDTH * BITS % 8)[None, :]) & ((1 << BITS) - 1)


@triton.jit
def split_word(word):
    """Return the lower and the higher half of integers as float32: of 32 bits two float16, of 64 bits two float32."""
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
    """Load what is stored of one row, float32 [slots, channels].

    Args:
        numbers: of the row's first slot, see `kernels.planes.Codes`.
        table: `affine`, int32 [entries, CHANNELS], scale and zero in one word; `book`, float16 [entries, D, 2^BITS];
            otherwise not read.
        entry: int32, each slot's entry, if there are ENTRIES; `affine` without them has one for every slot.
        slot: int32 [slots], inside the row.
        channel: int32 [channels], in the order of storage.
        SCHEME: `affine`, `book`, `float8` (bytes of e4m3) or `float`.
        ENTRIES: see `entry`.
        CHANNELS: D, or 1 where all channels of a slot share scale and zero.
        BITS: of a number.
        HEAD_DIM: D.
    """
    place = (channel % HEAD_DIM)[None, :]
    if SCHEME == "float":
        return tl.load(numbers + (slot[:, None] * HEAD_DIM + place)).to(tl.float32)
    else:
        code = load_codes(numbers, slot, channel, BITS, HEAD_DIM)
        if SCHEME == "float8":
            # Exponent and mantissa at their places in float16, whose bias is larger by 8.
            half = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
            return half.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 256
        else:
            if ENTRIES:
                slot = tl.load(entry + slot)
            if SCHEME == "book":
                at = ((slot[:, None] * HEAD_DIM + place) << BITS) + code
                return tl.load(table + at).to(tl.float32)
            elif CHANNELS == 1:
                scale, zero = split_word(tl.load(table + slot))
                return code.to(tl.float32) * scale[:, None] + zero[:, None]
            else:
                scale, zero = split_word(tl.load(table + (slot[:, None] * HEAD_DIM + place)))
                return code.to(tl.float32) * scale + zero
