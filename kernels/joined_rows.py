"""Keys and values of past and present in one buffer, outside CUDA: attention, scores and a rebuild read it."""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.layout import Group, Past, arrange_rows, cache_on_host

KEY_MULTIPLE = 16
"""Divisor of a row's padded number of keys: softmax over 399 scores takes longer than over 400."""


class RowSet(NamedTuple):
    """Rows of unequal length whose attention is computed together, with their keys padded to a common number.

    Attributes:
        rows: int64 [n]; None for all rows of the layout in their order.
        indices: int64 [2, n x batch, keys], indices of keys and of values in the buffer flattened to [slots, D].
        ends: int64 [n, 1, 1, 1], keys of each row without padding.
        least: keys of the shortest row.
        absent: bool [n, 1, 1, keys - least], which of the last keys are padding.
    """

    rows: Tensor | None
    indices: Tensor
    ends: Tensor
    least: int
    absent: Tensor


class JoinedRows:
    """Keys and values of a layer's past and present, copied to one buffer when they are first read.

    Attributes:
        batch: sequences that share the layout.
        dense: whether rows are equally long, and adjacent in the buffer.
        keys: keys of the longest row.
        width: keys of each row in the buffer, with padding, if they are adjacent.

    Args:
        past: stored keys and values, of any dtype.
        k: current keys [sequences, heads, tokens, D].
        v: current values, shaped like `k`.
    """

    def __init__(self, past: Past, k: Tensor, v: Tensor) -> None:
        self._past, self._present, layout = past, (k, v), past.layout
        self.batch, self._tokens, self._count = past.keys.shape[0], k.shape[2], len(layout.counts)
        self.keys = layout.longest + self._tokens
        self.width = round_up(self.keys) if layout.longest else self.keys
        slots = layout.capacity + self._count * self._tokens
        self.dense = layout.uniform and not layout.free_slots
        self._slots = self._count * self.width if self.dense else slots

    @cached_property
    def buffer(self) -> Tensor:
        """Keys and values [2, batch, slots, D] in the present's dtype: equally long rows, or past and present."""
        layout, present = self._past.layout, self._present
        buffer = present[0].new_empty(2, self.batch, self._slots, present[0].shape[3])
        if self.dense and self.width > self.keys:
            buffer.view(2, -1, self.width, buffer.shape[3])[:, :, self.keys :] = 0
        for part, stored, new in zip(buffer, self._past[:2], present, strict=True):
            if self.dense:
                shape = (*new.shape[:2], -1, new.shape[3])
                rows = part.view(*new.shape[:2], self.width, -1).narrow(2, 0, self.keys)
                torch.cat((stored.view(shape), new), 2, out=rows)
            else:
                part[:, : layout.capacity] = stored
                new = new.view(self.batch, len(new) // self.batch, *new.shape[1:])
                part[:, layout.capacity :].view(new.shape).copy_(new)
        return buffer

    def find_set(self, groups: Sequence[Group], first: int) -> RowSet:
        """Return the tables of the rows of some groups, whose first row has index `first` in storage order."""
        layout, size = self._past.layout, sum(group.size for group in groups)
        key = layout.counts, layout.free_slots, first, size, self._tokens, self.batch
        return _find_set(layout.offsets, 2 * self.batch * size * self.keys, *key)

    def read(self, pairs: slice, indices: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return keys and values of some rows in all sequences, float32 [pairs, keys, D] each.

        Pass the `indices` of a `RowSet`, or None if all rows are equally long.
        """
        channels = self.buffer.shape[3]
        if indices is None:
            keys, values = self.buffer.view(2, -1, self.width, channels)[:, pairs].float()
        else:
            rows = self.buffer.view(-1, channels).index_select(0, indices[:, pairs].flatten())
            keys, values = rows.view(2, -1, indices.shape[2], channels).float()
        return keys, values

    def read_slots(self, part: int = 0) -> Tensor:
        """Return keys (values with `part` 1) of cached and current slots, [batch, rows, longest + tokens, D].

        Slots past the end of a row have arbitrary values.
        """
        stored, layout = self.buffer[part], self._past.layout
        if self.dense:
            return stored.unflatten(1, (self._count, -1))[:, :, : self.keys]
        key = layout.counts, layout.free_slots, self._tokens
        indices = _find_slots(layout.offsets, self._count * self.keys, *key)
        return stored.index_select(1, indices).unflatten(1, (self._count, -1))

    def find_origins(self, source: Tensor) -> Tensor:
        """Return the buffer indices of the slots with sources `source` (`kernels.compact.source_table`)."""
        layout = self._past.layout
        origins = torch.where(source < 0, layout.capacity - 1 - source, source)
        if not self.dense:
            return origins
        key = self._count, layout.longest, self._tokens, self.width
        return _find_dense(layout.offsets, self._slots, *key).index_select(0, origins)


@cache_on_host
def _find_set(
    counts: Sequence[int], free_slots: int, first: int, size: int, tokens: int, batch: int, on: torch.device
) -> RowSet:
    """Return the tables of `size` rows in storage order from row `first` on."""
    layout = arrange_rows(torch.empty(0, device=on), counts, free_slots)
    rows = layout.order[first : first + size].long() if size < len(counts) else torch.arange(size)
    past, slots = layout.lengths[rows, None], layout.capacity + len(counts) * tokens
    keys, least = round_up(int(past.max()) + tokens), int(past.min()) + tokens
    token = torch.arange(keys) - past
    # The last token is repeated as padding.
    current = layout.capacity + rows[:, None] * tokens + token.clamp(max=tokens - 1)
    indices = torch.where(token < 0, layout.offsets[rows, None] + token + past, current)
    indices = indices[:, None] + slots * torch.arange(2 * batch).view(2, 1, batch, 1)
    ends = past[:, :, None, None] + tokens
    absent = torch.arange(least, keys) >= ends
    return RowSet(rows if size < len(counts) else None, indices.flatten(1, 2), ends, least, absent)


@cache_on_host
def _find_slots(counts: Sequence[int], free_slots: int, tokens: int, device: torch.device) -> Tensor:
    """Return the indices of all slots of rows of unequal length, int64 [slots]; see `JoinedRows.read_slots`."""
    layout = arrange_rows(torch.empty(0, device=device), counts, free_slots)
    old = layout.offsets[:, None] + torch.arange(max(counts))
    new = layout.capacity + torch.arange(len(counts) * tokens).view(len(counts), tokens)
    return torch.cat((old.clamp_(max=layout.capacity - 1), new), 1).flatten()


@cache_on_host
def _find_dense(rows: int, longest: int, tokens: int, width: int, device: torch.device) -> Tensor:
    """Return the indices of all past, then all current slots of equally long rows, int64 [slots]."""
    indices = torch.arange(rows * width, device=device).view(rows, width)[:, : longest + tokens]
    return torch.cat([part.flatten() for part in indices.split((longest, tokens), 1)])


def round_up(keys: int) -> int:
    """Round a number of keys up to a multiple of `KEY_MULTIPLE`."""
    return -(-keys // KEY_MULTIPLE) * KEY_MULTIPLE
