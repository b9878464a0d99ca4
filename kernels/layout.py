"""Layout of rows of unequal length in a flat buffer.

Storage is flat, [batch, slots, D]: the slots of a row are contiguous, in position order, and rows of equal length are
adjacent, so that each such group is a dense [batch, rows, length, D] view and no row is padded to the longest. `batch`
counts sequences with the same slots (static methods); if sequences keep different slots, it is 1 and every
(sequence, head) pair is a row. Free slots after each row store the tokens of an unfinished segment.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

MAX_TABLE = 1 << 16
"""Elements up to which a table is cached for other layers and generations."""
Table = TypeVar("Table")


class Group(NamedTuple):
    """Adjacent rows of one length, in `Layout.order`.

    Attributes:
        start: first slot of the first row in the flat buffer.
        length: slots of each row.
        size: number of rows.
        free_slots: free slots after each row.
    """

    start: int
    length: int
    size: int
    free_slots: int = 0


class Layout(NamedTuple):
    """Offsets and lengths of the rows of a flat buffer.

    Attributes:
        positions: int64 [rows, longest], token position of each slot, -1 past the end of a row.
        offsets: int64 [rows], first slot of each row in the flat buffer.
        lengths: int32 [rows], slots of each row.
        order: int32 [rows], rows in storage order: longest first, ties by index.
        places: int32 [rows], index of each row in `order`.
        counts: `lengths` as ints.
        groups: rows by length.
        total: slots of all rows, without free slots.
        free_slots: slots after every row, for tokens of an unfinished segment.
    """

    positions: Tensor
    offsets: Tensor
    lengths: Tensor
    order: Tensor
    places: Tensor
    counts: tuple[int, ...]
    groups: tuple[Group, ...]
    total: int
    free_slots: int = 0

    @property
    def uniform(self) -> bool:
        """Whether all rows have the same number of slots."""
        return self.total == self.longest * len(self.counts)

    @property
    def longest(self) -> int:
        """Number of slots of the longest row."""
        return self.positions.shape[1]

    @property
    def capacity(self) -> int:
        """Slots of the flat buffer: slots of all rows and the free slots after them."""
        return self.total + self.free_slots * len(self.counts)


class Past(NamedTuple):
    """Stored keys and values of a layer's rows.

    Attributes:
        keys: flat storage [batch, slots, D], finite in every slot.
        values: shaped like `keys`.
        layout: layout of both.
        joined: both with the present of a call (`kernels.joined_rows.JoinedRows`), if several calls share it, or None.
    """

    keys: Tensor
    values: Tensor
    layout: Layout
    joined: Any = None


State = tuple[Tensor, Tensor]
"""Attention over some of the keys: the output [sequences, heads, queries, D] and the log-sum-exp of the scores in
nats, float32 [sequences, heads, queries], contiguous. Without keys it is (0, -inf)."""


class RowOffsets(NamedTuple):
    """Offsets of a layer's rows, on the device, for the one-token kernel.

    Attributes:
        keys: flat buffer of keys, [elements].
        values: flat buffer of values, [elements].
        key_offsets: int64 [rows], first slot of each row of the first sequence in `keys`, in slots of D elements.
        value_offsets: int64 [rows], first slots in `values`, likewise.
        lengths: int32 [rows], slots of each row before the segment.
        order: int32 [rows], rows in storage order.
        stride: int64 [1], slots from a sequence of the batch to the next.
        filled: int64 [1], tokens of the segment before the step.
        longest: slots expected of a generation's longest row, free ones included; decides how programs share rows.
    """

    keys: Tensor
    values: Tensor
    key_offsets: Tensor
    value_offsets: Tensor
    lengths: Tensor
    order: Tensor
    stride: Tensor
    filled: Tensor
    longest: int


def locate_rows(past: Past, filled: Tensor) -> RowOffsets:
    """Return the row offsets of a layer with its own buffers; `filled` as in `RowOffsets`."""
    keys, values, layout, _ = past
    stride = torch.tensor([keys.shape[1]]).to(keys.device, non_blocking=True)
    rows = (layout.offsets, layout.offsets, layout.lengths, layout.order)
    return RowOffsets(
        keys.view(-1), values.view(-1), *rows, stride, filled, layout.longest + layout.free_slots
    )


def cache_on_host(find: Callable[..., Table]) -> Callable[..., Table]:
    """Cache tables on the host, for all layers and generations with rows of equal lengths.

    The returned function has two more arguments in front: a tensor on the table's device, and the number of elements
    of the table, which is not cached if there are more than `MAX_TABLE`.
    """

    @lru_cache(256)
    def find_once(*key: Any) -> Table:
        with torch.inference_mode(False):
            return find(*key)

    def find_known(like: Tensor, size: int, *key: Any) -> Table:
        on_host = type(like) is Tensor and like.device.type == "cpu" and size <= MAX_TABLE
        return (find_once if on_host else find)(*key, like.device)

    return find_known


def arrange_rows(positions: Tensor, counts: Sequence[int], free_slots: int = 0) -> Layout:
    """Return the layout of rows of `counts` tokens at `positions` [rows, longest], with `free_slots` after each."""
    return Layout(positions, *_find_tables(positions, len(counts), tuple(counts), free_slots))


@cache_on_host
def _find_tables(counts: tuple[int, ...], free_slots: int, device: torch.device) -> tuple[Any, ...]:
    """Return `Layout`'s fields after `positions`."""
    order = sorted(range(len(counts)), key=lambda row: -counts[row])
    offsets, places, groups, end = [0] * len(counts), [0] * len(counts), [], 0
    for index, row in enumerate(order):
        offsets[row], places[row] = end, index
        end += counts[row] + free_slots
    for length, equal in groupby(order, key=counts.__getitem__):
        rows = list(equal)
        groups.append(Group(offsets[rows[0]], length, len(rows), free_slots))
    # One transfer; from pageable memory it does not wait for the device.
    table = torch.tensor((offsets, counts, order, places), dtype=torch.int64)
    at, *others = table.to(device, non_blocking=True)
    lengths, by_length, place_of = (other.int() for other in others)
    return at, lengths, by_length, place_of, counts, tuple(groups), sum(counts), free_slots


def empty_layout(rows: int, device: torch.device | str, free_slots: int = 0) -> Layout:
    """Return the layout of empty rows with `free_slots` free slots each."""
    return arrange_rows(torch.empty(rows, 0, dtype=torch.int64, device=device), [0] * rows, free_slots)


def list_positions(layout: Layout, start: int, length: int) -> Tensor:
    """Return positions int64 [rows, longest + length] of the cached slots followed by the current segment's."""
    positions, rows = layout.positions, len(layout.counts)
    return torch.cat((positions, _repeat_positions(positions, rows * length, start, length, rows)), 1)


@cache_on_host
def _repeat_positions(start: int, length: int, rows: int, device: torch.device) -> Tensor:
    return torch.arange(start, start + length, device=device).expand(rows, -1)


def fold_rows(x: Tensor, batch: int, rows: int) -> Tensor:
    """Reshape [sequences, heads, tokens, D] to the rows [batch, rows, tokens, D] of a layout."""
    return x if x.shape[:2] == (batch, rows) else x.reshape(batch, rows, -1, x.shape[-1])


def pack_rows(values: Tensor, keep: Tensor, fill: float, longest: int) -> Tensor:
    """Move the values of kept slots to the front of each row and pad with `fill`.

    Args:
        values: one value per slot [rows, slots], or several [rows, slots, n].
        keep: bool [rows, slots].
        fill: padding value.
        longest: maximum number of kept slots in a row.

    Returns:
        [rows, longest, ...] in the dtype of `values`.
    """
    if values.ndim == 2 and not values.is_cuda:
        packed = values.masked_select(keep)
        if len(packed) == len(values) * longest:
            return packed.view(len(values), longest)
        exists = torch.arange(longest) < keep.sum(1, keepdim=True)
        return values.new_full(exists.shape, fill).masked_scatter_(exists, packed)
    # Evicted slots go to the last column.
    result = values.new_full((len(values), longest + 1, *values.shape[2:]), fill)
    index = (keep.cumsum(1) - 1).masked_fill_(~keep, longest)
    result.scatter_(1, index.view(*index.shape, *[1] * (values.ndim - 2)).expand_as(values), values)
    return result[:, :longest].contiguous()


def pad_rows(storage: Tensor, layout: Layout) -> Tensor:
    """Return every row's slots, padded to the longest row with arbitrary stored values.

    Args:
        storage: flat buffer [batch, capacity, D].
        layout: layout of the buffer.

    Returns:
        [batch, rows, longest, D], a view if all rows are equally long, else a copy.
    """
    if layout.uniform:
        return view_group(storage, layout.groups[0])
    slot = layout.offsets[:, None] + torch.arange(layout.longest, device=storage.device)
    slot.clamp_(max=layout.capacity - 1)
    return storage.index_select(1, slot.flatten()).unflatten(1, slot.shape)


def view_group(storage: Tensor, group: Group, more: int = 0) -> Tensor:
    """Return a group's slots, with `more` free slots after each row: a view [batch, rows, length + more, D]."""
    batch, _, channels = storage.shape
    outer, slot, channel = storage.stride()
    shape = (batch, group.size, group.length + more, channels)
    strides = (outer, (group.length + group.free_slots) * slot, slot, channel)
    # One call in place of three: layers of unequal rows ask for hundreds of these views.
    return storage.as_strided(shape, strides, storage.storage_offset() + group.start * slot)


def view_free_slots(storage: Tensor, layout: Layout, start: int, stop: int) -> Tensor:
    """Return free slots `start` to `stop` after each row, [batch, rows, stop - start, D].

    It is a view if all rows are equally long, else a copy.
    """
    if layout.uniform:
        return view_group(storage, layout.groups[0], stop)[:, :, layout.longest + start :]
    slot = list_free_slots(layout, start, stop)
    return storage.index_select(1, slot.flatten()).unflatten(1, slot.shape)


def list_free_slots(layout: Layout, start: int, stop: int) -> Tensor:
    """Return the flat indices int64 [rows, stop - start] of free slots `start` to `stop` after each row."""
    steps = torch.arange(start, stop, device=layout.offsets.device)
    return (layout.offsets + layout.lengths)[:, None] + steps
