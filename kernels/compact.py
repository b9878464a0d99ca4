"""Rows of any length in one exact-size buffer, and the index tables that rebuild it after a segment.

Storage is flat, [batch, slots, D]: the slots of a row are neighbours in position order, and rows of equal length are
neighbours too, so that each such group is a dense [batch, rows, length, D] view and no row is padded to the longest.
`batch` counts sequences that are treated alike (static methods); where each sequence keeps other slots it is 1 and all
(sequence, head) pairs are rows.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Group(NamedTuple):
    """Rows of one length: which (None: all, in order), first slot in the flat buffer, slots per row, how many rows."""

    rows: Tensor | None
    start: int
    length: int
    size: int


class Layout(NamedTuple):
    """Where rows lie.

    Attributes:
        positions: int64 [rows, longest], token position of each slot, -1 past a row's end.
        offsets: int64 [rows], first slot of each row in the flat buffer.
        groups: rows by length, empty rows left out.
        total: slots of all rows.
    """

    positions: Tensor
    offsets: Tensor
    groups: tuple[Group, ...]
    total: int


class Tables(NamedTuple):
    """Flat slots to copy: from the old buffer and from the current segment, and where each goes."""

    old_from: Tensor
    old_to: Tensor
    new_from: Tensor
    new_to: Tensor


def empty_layout(rows: int, device: torch.device | str) -> Layout:
    """Layout of rows that hold nothing."""
    zeros = torch.zeros(rows, dtype=torch.int64, device=device)
    return Layout(zeros.new_zeros(rows, 0), zeros, (), 0)


def slots_seen(layout: Layout, start: int, length: int) -> Tensor:
    """Positions int64 [rows, longest + length] of the cached slots followed by the current segment's."""
    current = torch.arange(start, start + length, device=layout.positions.device)
    return torch.cat((layout.positions, current.expand(len(layout.positions), -1)), 1)


def plan(layout: Layout, keep: Tensor | None, start: int, length: int) -> tuple[Layout, Tables]:
    """Layout and copy tables after keeping some slots.

    Args:
        layout: before the segment.
        keep: bool [rows, longest + length] over the slots of `slots_seen`, padding ignored; None keeps all.
        start: position of the segment's first token.
        length: tokens of the segment.
    """
    seen = slots_seen(layout, start, length)
    keep = seen >= 0 if keep is None else keep & (seen >= 0)
    rows, longest = layout.positions.shape
    lengths = keep.sum(1)
    groups: list[Group] = []
    offsets = torch.zeros_like(layout.offsets)
    total = 0
    for size in sorted(set(lengths.tolist()) - {0}, reverse=True):
        members = (lengths == size).nonzero().squeeze(1)
        offsets[members] = total + size * torch.arange(len(members), device=offsets.device)
        groups.append(Group(None if len(members) == rows else members, total, size, len(members)))
        total += size * len(members)
    row, slot = keep.nonzero(as_tuple=True)
    target = offsets[row] + (keep.cumsum(1) - 1)[row, slot]
    old, new = slot < longest, slot >= longest
    tables = Tables(
        layout.offsets[row[old]] + slot[old],
        target[old],
        row[new] * length + slot[new] - longest,
        target[new],
    )
    return Layout(packed(seen, keep, -1), offsets, tuple(groups), total), tables


def packed(values: Tensor, keep: Tensor, fill: float) -> Tensor:
    """What belongs to the kept slots, moved to the front of each row and padded with `fill`.

    Args:
        values: one number per slot [rows, slots].
        keep: bool [rows, slots].
        fill: for rows that keep fewer than the most.
    """
    row, slot = keep.nonzero(as_tuple=True)
    longest = int(keep.sum(1).max()) if len(keep) else 0
    result = values.new_full((len(values), longest), fill)
    result[row, (keep.cumsum(1) - 1)[row, slot]] = values[row, slot]
    return result


def rebuild(storage: Tensor, current: Tensor, tables: Tables, total: int) -> Tensor:
    """Copies kept slots into a new buffer of exactly `total` slots.

    Args:
        storage: flat buffer [batch, slots, D].
        current: the segment's keys or values [batch, rows, length, D].
        tables: what goes where.
        total: slots of the new layout.
    """
    result = storage.new_empty(storage.shape[0], total, storage.shape[2])
    if len(tables.old_from):
        result.index_copy_(1, tables.old_to, storage.index_select(1, tables.old_from))
    if len(tables.new_from):
        flat = current.reshape(current.shape[0], -1, current.shape[-1])
        result.index_copy_(1, tables.new_to, flat.index_select(1, tables.new_from).to(storage.dtype))
    return result
