"""Rebuild of a layer's storage after a segment: index table and copy."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.kernels.layout import Layout, arrange_rows, cache_on_host, list_free_slots, pack_rows

Pair = tuple[Tensor, Tensor]
"""Keys and values, in this order."""


def source_table(
    layout: Layout,
    keep: Tensor | None,
    positions: Tensor,
    length: int,
    free_slots: int = 0,
    counts: Sequence[int] | None = None,
) -> tuple[Layout, Tensor]:
    """Return the layout and source table after some slots are kept.

    Args:
        layout: layout before the segment; its free slots, if any, hold the segment's tokens.
        keep: bool [rows, longest + length] over the slots of `positions`, padding ignored; None keeps all.
        positions: int64 [rows, longest + length] of `list_positions`.
        length: tokens of the segment.
        free_slots: free slots behind every row of the new layout.
        counts: kept slots of each row; None reads them from `keep`, for which the host waits once. Wrong counts raise
            an error, on a GPU at a later call.

    Returns:
        The new layout, and the source of each flat slot, int32 [capacity]: x >= 0 is slot x of the old buffer, x < 0 is
        token -1 - x of the current segment, counted row by row. Sources of free slots are arbitrary.
    """
    if keep is None or not layout.uniform:
        keep = positions >= 0 if keep is None else keep & (positions >= 0)
    kept = keep.sum(1)
    known, counts = counts is not None, kept.tolist() if counts is None else [*counts]
    after = arrange_rows(pack_rows(positions, keep, -1, max(counts, default=0)), counts, free_slots)
    if known:
        torch._assert_async(
            (kept == after.lengths).all(), "a method keeps more or fewer slots than `capacity`"
        )
    slots = _number_slots(positions, positions.numel(), layout.counts, layout.free_slots, length)
    if not (layout.free_slots or known or free_slots or positions.is_cuda):
        # All slots are selected in their order, and none are free.
        rows = (slots, keep) if after.uniform else (x.index_select(0, after.order) for x in (slots, keep))
        return after, torch.masked_select(*rows)
    target = find_targets(after, keep)
    source = torch.zeros(  # evicted slots go to the last entry
        after.capacity + 1, dtype=torch.int32, device=keep.device
    )
    source.scatter_(0, target.flatten(), slots.flatten())
    return after, source[: after.capacity]


@cache_on_host
def _number_slots(counts: Sequence[int], free_slots: int, length: int, device: torch.device) -> Tensor:
    """Return each slot's source for rows of `counts` tokens (`source_table`), int32 [rows, longest + length]."""
    layout = arrange_rows(torch.empty(0, device=device), counts, free_slots)
    old = layout.offsets[:, None] + torch.arange(max(counts), device=device)
    new = -1 - torch.arange(len(counts) * length, device=device).view(len(counts), length)
    if free_slots:
        new = list_free_slots(layout, 0, length)
    return torch.cat((old, new), 1).int()


def list_origins(after: Layout, keep: Tensor) -> Tensor:
    """Return the former slot of every slot of the new storage, int64 [capacity]; 0 for free slots.

    The layout has the number of kept slots, so the host does not wait for the device.

    Args:
        after: new layout of `source_table`.
        keep: bool [rows, slots], slots that are kept, none past the end of a row; slots are numbered row by row.
    """
    origins = torch.zeros(after.capacity + 1, dtype=torch.int64, device=keep.device)
    slots = torch.arange(keep.numel(), device=keep.device)
    origins.scatter_(0, find_targets(after, keep).flatten(), slots)
    return origins[: after.capacity]


def find_targets(after: Layout, keep: Tensor) -> Tensor:
    """Return the new slot of each slot, int64 [rows, slots]; `after.capacity` for evicted slots."""
    return (after.offsets[:, None] + keep.cumsum(1) - 1).masked_fill_(~keep, after.capacity)


def rebuild(storage: Tensor, current: Tensor, source: Tensor, out: Tensor) -> None:
    """Copy kept slots into a buffer of their number: on CUDA in one launch, else from a copy of past and present.

    Args:
        storage: flat buffer [batch, slots, D].
        current: the segment's keys or values [sequences, heads, length, D], of any dtype and strides; their heads are
            the rows, one sequence after the other where each has rows of its own.
        source: source of the new slots, see `source_table`.
        out: destination of the slots, [batch, len(source), D] contiguous, in the storage's dtype and apart from it.
    """
    if storage.is_cuda:
        from kvbench.kernels.triton.compact import rebuild_triton

        rebuild_triton((storage,), (current,), source, (out,))
        return
    current = current.unflatten(0, (len(storage), -1))  # [batch, sequences / batch, heads, length, D]
    slots, shape = storage.shape[1], current.shape[1:4]
    joined = storage.new_empty(len(storage), slots + shape.numel(), storage.shape[2])
    joined[:, :slots] = storage
    joined[:, slots:].unflatten(1, shape).copy_(current)
    move_slots(joined, torch.where(source < 0, slots - 1 - source, source), out)


def rebuild_both(stored: Pair, current: Pair, source: Tensor, out: Pair) -> None:
    """Do what `rebuild` does for keys and values of one layer, on CUDA in one launch."""
    if stored[0].is_cuda:
        from kvbench.kernels.triton.compact import rebuild_triton

        rebuild_triton(stored, current, source, out)
        return
    for storage, present, moved in zip(stored, current, out, strict=True):
        rebuild(storage, present, source, moved)


def move_slots(storage: Tensor, source: Tensor, out: Tensor) -> None:
    """Copy slots `source` int32 [count] of a flat buffer [batch, slots, D] into `out` [batch, count, D]."""
    torch.index_select(storage, 1, source, out=out)
