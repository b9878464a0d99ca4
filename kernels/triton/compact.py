"""Copy of kept slots into a new buffer in one launch (see `rebuild` in `kernels/compact.py`)."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.triton.launch import align_rows, cdiv, find_unit, kernel, next_power_of_2

BLOCK = 64  # slots per program


@triton.jit
def _copy_slots(
    storage, current, result, stored, fresh, target, old, new, inside, fits, HEAD_DIM: tl.constexpr
):  # fmt: skip
    """Copy a block of slots to `target`, from the old storage at `stored` or from the segment at `fresh`."""
    channel = tl.arange(0, fits.shape[1])[None, :]
    # Every slot has one source, so the predicated loads read nothing twice.
    past = tl.load(storage + stored[:, None] * HEAD_DIM + channel, mask=old[:, None] & fits, other=0.0)
    present = tl.load(current + fresh[:, None] + channel, mask=new[:, None] & fits, other=0.0)
    moved = tl.where(old[:, None], past, present.to(storage.dtype.element_ty))
    tl.store(result + target[:, None] * HEAD_DIM + channel, moved, mask=inside[:, None] & fits)


@kernel("source")
def copy_kernel(
    keys, values, k, v, source, new_keys, new_values,
    heads: tl.int32, rows: tl.int32, slots: tl.int64, total: tl.int32, length: tl.int32,
    k_b: tl.int64, k_r: tl.int64, k_t: tl.int64, v_b: tl.int64, v_r: tl.int64, v_t: tl.int64,
    UNIT: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
    BOTH: tl.constexpr,
):  # fmt: skip
    """Copy one block of slots of one sequence: keys and, if `BOTH`, values; strides of k and v count `UNIT`s."""
    batch = tl.program_id(1).to(tl.int64)
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = slot < total
    origin = tl.load(source + slot, mask=inside, other=0)
    old = inside & (origin >= 0)
    new = inside & (origin < 0)
    fits = (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
    stored = batch * slots + tl.where(old, origin, 0).to(tl.int64)
    target = batch * total + slot.to(tl.int64)
    token = tl.where(new, -1 - origin, 0)
    row = tl.program_id(1) * rows + token // length
    sequence = (row // heads).to(tl.int64)
    head = (row % heads).to(tl.int64)
    at = (token % length).to(tl.int64)
    fresh = (sequence * k_b + head * k_r + at * k_t) * UNIT
    _copy_slots(keys, k, new_keys, stored, fresh, target, old, new, inside, fits, HEAD_DIM)
    if BOTH:
        fresh = (sequence * v_b + head * v_r + at * v_t) * UNIT
        _copy_slots(values, v, new_values, stored, fresh, target, old, new, inside, fits, HEAD_DIM)


def rebuild_triton(
    stored: Sequence[Tensor], current: Sequence[Tensor], source: Tensor, out: Sequence[Tensor]
) -> None:
    """Compute `kernels.compact.rebuild` on a GPU, for keys, or for keys and values in one launch."""
    batch, slots, channels = stored[0].shape
    if not out[0].numel():
        return
    sequences, heads, length, _ = current[0].shape
    aligned = [align_rows(tensor) for tensor in current]
    (k, k_strides), (v, v_strides) = aligned[0], aligned[-1]
    copy_kernel[cdiv(len(source), BLOCK), batch](
        stored[0], stored[-1], k, v, source, out[0], out[-1],
        heads, sequences * heads // batch, slots, len(source), length, *k_strides, *v_strides,
        UNIT=find_unit(channels), HEAD_DIM=channels, BLOCK_D=next_power_of_2(channels), BLOCK=BLOCK,
        BOTH=len(stored) == 2,
    )  # fmt: skip
