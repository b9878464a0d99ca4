"""The copy of kept slots into a new buffer in one launch (see `rebuild` in `kernels/compact.py`)."""

import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.triton.launch import UNIT, align_rows, cdiv, next_power_of_2

BLOCK = 64  # slots per program


@triton.jit(
    do_not_specialize=["heads", "rows", "slots", "total", "length", "stride_b", "stride_r", "stride_t"],
    do_not_specialize_on_alignment=["source"],
)
def copy_kernel(
    storage,
    current,
    source,
    result,
    heads: tl.int32,
    rows: tl.int32,
    slots: tl.int64,
    total: tl.int32,
    length: tl.int32,
    stride_b: tl.int64,
    stride_r: tl.int64,
    stride_t: tl.int64,
    UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy one block of slots of one sequence; strides of `current` count `UNIT` elements."""
    batch = tl.program_id(1).to(tl.int64)
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.arange(0, BLOCK_D)
    inside = slot < total
    origin = tl.load(source + slot, mask=inside, other=0)
    old = inside & (origin >= 0)
    new = inside & (origin < 0)
    fits = channel[None, :] < HEAD_DIM
    # Every slot comes from one of the two: the loads are predicated, none is read twice.
    kept = tl.load(
        storage
        + (batch * slots + tl.where(old, origin, 0).to(tl.int64))[:, None] * HEAD_DIM
        + channel[None, :],
        mask=old[:, None] & fits,
        other=0.0,
    )
    token = tl.where(new, -1 - origin, 0)
    row = batch * rows + token // length
    place = row // heads * stride_b + row % heads * stride_r + (token % length).to(tl.int64) * stride_t
    fresh = tl.load(
        current + place[:, None] * UNIT + channel[None, :],
        mask=new[:, None] & fits,
        other=0.0,
    )
    moved = tl.where(old[:, None], kept, fresh.to(storage.dtype.element_ty))
    tl.store(
        result + (batch * total + slot.to(tl.int64))[:, None] * HEAD_DIM + channel[None, :],
        moved,
        mask=inside[:, None] & fits,
    )


def rebuild_triton(storage: Tensor, current: Tensor, source: Tensor, out: Tensor | None = None) -> Tensor:
    """Copy kept slots to a new buffer; arguments and result are those of `kernels.compact.rebuild`."""
    batch, slots, channels = storage.shape
    result = storage.new_empty(batch, len(source), channels) if out is None else out
    if not result.numel():
        return result
    sequences, heads = current.shape[:2]
    current, strides = align_rows(current)
    grid = (cdiv(len(source), BLOCK), batch)
    copy_kernel[grid](
        storage, current, source, result,
        heads, sequences * heads // batch, slots, len(source), current.shape[2], *strides,
        UNIT=UNIT, HEAD_DIM=channels, BLOCK_D=next_power_of_2(channels), BLOCK=BLOCK,
    )  # fmt: skip
    return result
