"""Rows of any length in one exact-size buffer, and the index table that rebuilds it after a segment.

Storage is flat, [batch, slots, D]: the slots of a row are neighbours in position order, and rows of equal length are
neighbours too, so that each such group is a dense [batch, rows, length, D] view and no row is padded to the longest.
`batch` counts sequences that are treated alike (static methods); where each sequence keeps other slots it is 1 and all
(sequence, head) pairs are rows.
"""

from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor


class Group(NamedTuple):
    """Rows of one length, neighbours in `Layout.order`: first slot in the flat buffer, slots per row, how many rows."""

    start: int
    length: int
    size: int


class Layout(NamedTuple):
    """Where rows lie.

    Attributes:
        positions: int64 [rows, longest], token position of each slot, -1 past a row's end.
        offsets: int64 [rows], first slot of each row in the flat buffer.
        lengths: int32 [rows], slots of each row.
        order: int32 [rows], rows longest first, equal ones in order; they lie in the buffer in this order.
        places: int32 [rows], where each row comes in that order.
        counts: the lengths again, on the host.
        groups: rows by length.
        total: slots of all rows.
    """

    positions: Tensor
    offsets: Tensor
    lengths: Tensor
    order: Tensor
    places: Tensor
    counts: tuple[int, ...]
    groups: tuple[Group, ...]
    total: int

    @property
    def uniform(self) -> bool:
        """Whether all rows are equally long."""
        return self.total == self.longest * len(self.counts)

    @property
    def longest(self) -> int:
        """Slots of the longest row."""
        return self.positions.shape[1]


def arranged(positions: Tensor, counts: list[int]) -> Layout:
    """The layout of rows that hold `counts` tokens at `positions` [rows, longest]."""
    order = sorted(range(len(counts)), key=lambda row: -counts[row])
    offsets, places, groups, total = [0] * len(counts), [0] * len(counts), [], 0
    for place, row in enumerate(order):
        offsets[row], places[row] = total, place
        total += counts[row]
    for length, equal in groupby(order, key=counts.__getitem__):
        rows = list(equal)
        groups.append(Group(offsets[rows[0]], length, len(rows)))
    # One transfer; out of pageable memory it never waits for the device.
    table = torch.tensor((offsets, counts, order, places), dtype=torch.int64)
    at, *others = table.to(positions.device, non_blocking=True)
    lengths, by_length, place_of = (other.int() for other in others)
    return Layout(positions, at, lengths, by_length, place_of, tuple(counts), tuple(groups), total)


def empty_layout(rows: int, device: torch.device | str) -> Layout:
    """Layout of rows that hold nothing."""
    return arranged(torch.empty(rows, 0, dtype=torch.int64, device=device), [0] * rows)


def slots_seen(layout: Layout, start: int, length: int) -> Tensor:
    """Positions int64 [rows, longest + length] of the cached slots followed by the current segment's."""
    current = torch.arange(start, start + length, device=layout.positions.device)
    return torch.cat((layout.positions, current.expand(len(layout.positions), -1)), 1)


def plan(layout: Layout, keep: Tensor | None, start: int, length: int) -> tuple[Layout, Tensor]:
    """Layout and source table after keeping some slots; reads the number of kept slots on the host, once.

    Args:
        layout: before the segment.
        keep: bool [rows, longest + length] over the slots of `slots_seen`, padding ignored; None keeps all.
        start: position of the segment's first token.
        length: tokens of the segment.

    Returns:
        The new layout, and where its flat slots come from, int32 [total]: slot x of the old buffer, or, where negative,
        token -1 - x of the current segment, whose rows lie behind each other.
    """
    seen = slots_seen(layout, start, length)
    keep = seen >= 0 if keep is None else keep & (seen >= 0)
    counts = keep.sum(1).tolist()
    after = arranged(packed(seen, keep, -1, max(counts, default=0)), counts)
    row = torch.arange(len(counts), device=seen.device)[:, None]
    old = layout.offsets[:, None] + torch.arange(layout.longest, device=seen.device)
    new = -1 - row * length - torch.arange(length, device=seen.device)
    target = (after.offsets[:, None] + keep.cumsum(1) - 1).masked_fill_(~keep, after.total)
    source = torch.empty(
        after.total + 1, dtype=torch.int32, device=seen.device
    )  # what leaves goes to the last entry
    source.scatter_(0, target.flatten(), torch.cat((old, new), 1).flatten().int())
    return after, source[: after.total]


def packed(values: Tensor, keep: Tensor, fill: float, longest: int) -> Tensor:
    """What belongs to the kept slots, moved to the front of each row and padded with `fill`.

    Args:
        values: one number per slot [rows, slots].
        keep: bool [rows, slots].
        fill: for rows that keep fewer than the most.
        longest: the most that a row keeps.
    """
    result = values.new_full((len(values), longest + 1), fill)  # what leaves goes to the last column
    result.scatter_(1, (keep.cumsum(1) - 1).masked_fill_(~keep, longest), values)
    return result[:, :longest].contiguous()


def padded(storage: Tensor, layout: Layout) -> Tensor:
    """Every row's slots side by side, [batch, rows, longest, D]; past a row's end any finite or stored number.

    A view where all rows are equally long, else a copy.
    """
    if layout.uniform:
        return dense(storage, layout.groups[0])
    slot = layout.offsets[:, None] + torch.arange(layout.longest, device=storage.device)
    slot.clamp_(max=layout.total - 1)
    return storage.index_select(1, slot.flatten()).unflatten(1, slot.shape)


def dense(storage: Tensor, group: Group) -> Tensor:
    """A group's slots as a view [batch, rows, length, D] of flat storage [batch, slots, D]."""
    stop = group.start + group.size * group.length
    return storage[:, group.start : stop].unflatten(1, (group.size, group.length))


def rebuild(storage: Tensor, current: Tensor, source: Tensor) -> Tensor:
    """Copies kept slots into a new buffer of exactly as many; on CUDA in one launch, else by a copy of all there is.

    Args:
        storage: flat buffer [batch, slots, D].
        current: the segment's keys or values [batch, rows, length, D], of any dtype and strides.
        source: of the new slots, see `plan`.

    Returns:
        [batch, total, D] in the storage's dtype.
    """
    if storage.is_cuda:
        from kvbench.kernels.compact_triton import rebuild_triton

        return rebuild_triton(storage, current, source)
    slots, shape = storage.shape[1], current.shape[1:3]
    joined = storage.new_empty(storage.shape[0], slots + shape.numel(), storage.shape[2])
    joined[:, :slots] = storage
    joined[:, slots:].unflatten(1, shape).copy_(current)
    return joined.index_select(1, torch.where(source < 0, slots - 1 - source, source))
