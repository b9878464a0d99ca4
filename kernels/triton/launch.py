"""Shared parts of Triton kernels and their launches: aligned strides, grids, addresses, tiles and outputs."""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

UNITS = (8, 4)
"""Divisors of head dims and strides, in elements: 16-bit rows start at multiples of 16 or of 8 bytes."""
LOG2_E = 1.4426950408889634


def kernel(*unaligned: str) -> Callable[[Callable[..., None]], Any]:
    """Return a decorator for Triton kernels that does not specialise on values of annotated integers.

    Args:
        unaligned: pointers whose alignment is not specialised either.
    """

    def decorate(function: Callable[..., None]) -> Any:
        kinds = function.__annotations__.items()
        integers = [name for name, kind in kinds if kind in (tl.int32, tl.int64)]
        return triton.jit(
            function, do_not_specialize=integers, do_not_specialize_on_alignment=list(unaligned)
        )

    return decorate


def find_unit(channels: int) -> int:
    """Return the elements of a unit (`UNITS`) for a head dim.

    Raises:
        ValueError: no unit divides it.
    """
    for unit in UNITS:
        if channels % unit == 0:
            return unit
    raise ValueError(f"head dim {channels}: kernels on CUDA need a multiple of {UNITS[-1]}")


def align_rows(tensor: Tensor) -> tuple[Tensor, list[int]]:
    """Return a tensor with rows aligned to a unit (`find_unit`), and its strides without the last, in units.

    Kernels take strides in units, since the compiler knows that loads are aligned only from a constant factor, and
    Triton would compile a variant for every pattern of divisible strides. Unaligned tensors are copied.

    Args:
        tensor: [..., D].

    Raises:
        ValueError: no unit divides D.
    """
    unit = find_unit(tensor.shape[-1])
    strides = tensor.stride()
    # The stride of a dimension of one element is never used.
    used = [stride if size > 1 else 0 for stride, size in zip(strides, tensor.shape, strict=True)]
    if strides[-1] != 1 or any(stride % unit for stride in used[:-1]):
        tensor = tensor.contiguous()
        used = list(tensor.stride())
    return tensor, [stride // unit for stride in used[:-1]]


def cdiv(count: int, size: int) -> int:
    """Return the number of blocks of `size` that cover `count`, in plain Python: Triton's takes microseconds."""
    return -(-count // size)


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two >= `number`, in plain Python: Triton's takes microseconds."""
    return 1 << (number - 1).bit_length()


def count_warps(block: int, most: int = 8) -> int:
    """Return the warps for a row of `block` lanes: one for every 512 lanes, at most `most`."""
    return max(1, min(most, block // 512))


def list_constants(q: Tensor) -> dict[str, int | str | bool]:
    """Return the shared compile-time constants and options of attention kernels for queries [..., D]."""
    channels = q.shape[-1]
    return {
        "UNIT": find_unit(channels), "HEAD_DIM": channels, "BLOCK_D": max(16, next_power_of_2(channels)),
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32", "enable_fp_fusion": True,
    }  # fmt: skip


def make_partials(q: Tensor, share: int, lse: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Allocate the outputs of programs that split a row's keys, inputs of `softmax.merge_shares`.

    Args:
        q: [sequences, heads, queries, D].
        share: programs that split a row's keys.
        lse: log-sum-exp to overwrite if one program handles all keys; None allocates it.

    Returns:
        float32 outputs [share, sequences, heads, queries, D], unused for one split, and log-sum-exps
        [share, sequences, heads, queries].
    """
    if lse is None or share > 1:
        lse = q.new_empty(share, *q.shape[:3], dtype=torch.float32)
    else:
        lse = lse[None]
    return lse if share == 1 else q.new_empty(*lse.shape, q.shape[3], dtype=torch.float32), lse


@triton.jit
def locate_row(order, lengths, heads, splits):
    """Locate the row of a program. Grid: query block, sequence and split of the keys, rank of the row by length.

    Returns:
        Row, batch, split, sequence and head of its queries, and number of cached slots of the row.
    """
    row = tl.load(order + tl.program_id(2)).to(tl.int64)
    batch = (tl.program_id(1) // splits).to(tl.int64)
    return row, batch, tl.program_id(1) % splits, batch + row // heads, row % heads, tl.load(lengths + row)


@triton.jit
def load_tile(base, stride, slot, channel, fits, keep, WHOLE_D: tl.constexpr, WHOLE: tl.constexpr):
    """Load a tile [slots, channels] with zeros where masked; a full tile of a full head needs no mask."""
    place = base + slot[:, None] * stride + channel[None, :]
    if WHOLE and WHOLE_D:
        return tl.load(place)
    elif WHOLE:
        return tl.load(place, mask=fits[None, :], other=0.0)
    elif WHOLE_D:
        return tl.load(place, mask=keep[:, None], other=0.0)
    else:
        return tl.load(place, mask=keep[:, None] & fits[None, :], other=0.0)


@triton.jit
def load_queries(
    q, q_b, q_r, q_t, sequence, head, queries,
    UNIT: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Load the query tile of a program; the first grid axis counts query blocks.

    Returns:
        Query indices, their mask, channel indices, their mask, and the tile [M, D].
    """
    first = tl.program_id(0) * BLOCK_M
    query = first + tl.arange(0, BLOCK_M)
    channel = tl.arange(0, BLOCK_D)
    fits = channel < HEAD_DIM
    inside = query < queries
    q += (sequence * q_b + head * q_r + first.to(tl.int64) * q_t) * UNIT
    step = (q_t * UNIT).to(tl.int32)
    rows = tl.arange(0, BLOCK_M)
    return (
        query,
        inside,
        channel,
        fits,
        load_tile(q, step, rows, channel, fits, inside, HEAD_DIM == BLOCK_D, False),
    )
