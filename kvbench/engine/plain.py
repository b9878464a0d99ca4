"""Storage in 16 or 32 bits: exact size, in one ring for the keys and values of all layers."""

from fractions import Fraction
from math import ceil

import torch
from torch import Tensor

from kvbench.core.segments import ModelSpec, Segment
from kvbench.engine.arena import Arena
from kvbench.engine.memory import BIAS_CHANNELS
from kvbench.engine.schedule import (
    Change,
    Schedule,
    count_free_slots,
    predict_ring_slots,
    predict_row_lengths,
)
from kvbench.engine.storage import CacheBackend
from kvbench.engine.view import LayerStore
from kvbench.kernels.compact import move_slots, rebuild, rebuild_both
from kvbench.kernels.decode_attention import decode_attention, prepare_rows
from kvbench.kernels.layout import Layout, empty_layout, view_free_slots
from kvbench.kernels.ragged_attention import ragged_attention
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.capabilities import is_biased

REBUILD_BOUND = Fraction(11, 10)
"""Storage at the worst instant of a rebuild over B, for methods whose lengths are not known beforehand."""


class PlainStorage(CacheBackend):
    """Keys and values of all layers as numbers that attention reads where they lie.

    Attributes:
        arena: the ring; made anew when a generation needs a larger one.

    Args:
        spec: the model's shapes.
        method: prepared.
        dtype: of the stored keys and values.
        device: where they live.
    """

    def __init__(self, spec: ModelSpec, method: Method, dtype: torch.dtype, device: torch.device) -> None:
        self._spec, self._method, self._dtype, self._device = spec, method, dtype, device
        self._channels = spec.head_dim + (BIAS_CHANNELS if is_biased(method) else 0)
        self.arena = Arena(0, dtype, device)
        self._together = False  # whether keys and values were moved at once when storage changed last
        self._ring: int | None = None  # slots of one sequence that the arena must hold
        self._layouts: dict[
            tuple[int, int], Layout
        ] = {}  # of empty rows, by their number and the free slots behind them

    def prepare(self, sequences: int, batch: int, rows: int, schedule: Schedule) -> None:
        """Clear the ring, and make it larger where this generation may hold more than those before."""
        self._batch, self._rows = batch, rows
        if self._ring is None:
            self._ring = self._predict_ring_slots(schedule)
        numbers = self._ring * sequences * self._channels
        if numbers > self.arena.numbers:
            self.arena = Arena(0, self._dtype, self._device)  # the old one is gone before the new one is made
            self.arena = Arena(numbers, self._dtype, self._device)
        self.arena.clear()

    def find_free_slots(self, index: int) -> int:
        """Return the free slots that every row needs while segment `index` runs."""
        return count_free_slots(self._spec, index)

    def open(self, layer: int, free_slots: int = 0) -> LayerStore:
        """Return storage that holds nothing yet, with so many free slots behind every row."""
        at = (self._rows, free_slots)
        if at not in self._layouts:
            self._layouts[at] = empty_layout(self._rows, self._device, free_slots)
        layout = self._layouts[at]
        shape = (self._batch, layout.capacity, self._channels)
        parts = [self.arena.take(shape) for _ in ("keys", "values")]
        for tensor, _ in parts:
            tensor.zero_()  # free slots are read before they are filled where rows are padded
        (keys, first), (values, second) = parts
        return LayerStore(layout, keys, values, (first, second))

    def close(self, store: LayerStore) -> None:
        """Take a layer's storage back."""
        for ticket in store.tickets:
            self.arena.release(ticket)

    def release(self) -> None:
        """Give back the ring."""
        self.arena = Arena(0, self._dtype, self._device)

    def attend(self, store: LayerStore, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        """Attend over a layer's past and the whole present (`kernels.ragged_attention`)."""
        return ragged_attention(q, k, v, store.past, self._spec.logit_scale)

    def can_append(self, change: Change, dtype: torch.dtype) -> bool:
        """Return whether past and present will lie together in the new storage as attention reads them."""
        return change.appends and self._dtype == dtype

    def attend_step(
        self, store: LayerStore, q: Tensor, k: Tensor, v: Tensor, length: int, filled: Tensor
    ) -> Tensor:
        """Attend with the next tokens of a causal segment, which are put into the free slots behind the rows."""
        if store.rows is None:
            store.rows = prepare_rows(store.past, filled=filled)
        return decode_attention(q, k, v, store.rows, store.filled, self._spec.logit_scale)

    def fill(self, store: LayerStore, k: Tensor, v: Tensor) -> None:
        """Put all tokens of a causal segment into the free slots behind the rows."""
        for storage, new in ((store.keys, k), (store.values, v)):
            view_free_slots(storage, store.layout, 0, new.shape[2]).copy_(new)

    def view_flight(self, store: LayerStore, length: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a full causal segment of `length` tokens, [batch, rows, tokens, D]."""
        keys, values = (view_free_slots(x, store.layout, 0, length) for x in (store.keys, store.values))
        return keys, values

    def change(
        self, layer: int, store: LayerStore, present: tuple[Tensor, Tensor], at: Segment, change: Change
    ) -> LayerStore:
        """Return a layer's storage after a segment."""
        contents = change.contents
        shape = (self._batch, change.layout.capacity, store.keys.shape[2])
        self._together = store.keys.is_cuda and not store.layout.free_slots and contents is None
        if self._together and self.arena.fits(2 * torch.Size(shape).numel()):
            (keys, first), (values, second) = (self.arena.take(shape) for _ in ("keys", "values"))
            rebuild_both((store.keys, store.values), present, change.source, (keys, values))
            self.close(store)
            return LayerStore(change.layout, keys, values, (first, second), state=change.state)
        self._together = False
        # One after the other: the old keys are gone before the new values are made.
        keys, first = self._move(store.keys, store, present[0], change)
        if contents is not None:
            keys.copy_(contents.keys)
        self.arena.release(store.tickets[0])
        store.keys = keys
        values, second = self._move(store.values, store, present[1], change)
        if contents is not None:
            values.copy_(contents.values)
        self.arena.release(store.tickets[1])
        return LayerStore(change.layout, keys, values, (first, second), state=change.state)

    def count_rebuild(self, before: int, after: int) -> int:
        """Return the most bytes of a layer at an instant of its last rebuild, with so many before and after."""
        if self._together:
            return before + after
        return max(before + after // 2, before // 2 + after)

    def _move(
        self, storage: Tensor, store: LayerStore, current: Tensor, change: Change
    ) -> tuple[Tensor, int | None]:
        """Copy what stays of a layer's keys or values to new storage."""
        moved, ticket = self.arena.take((self._batch, change.layout.capacity, storage.shape[2]))
        if store.layout.free_slots:
            move_slots(storage, change.source, moved)
        elif change.appends and not storage.is_cuda and not change.layout.free_slots:
            # A GPU copies by a table as fast as without one.
            past = storage.unflatten(1, (self._rows, -1)) if storage.shape[1] else current[:, :, :0]
            parts = (past.to(self._dtype), current.to(self._dtype))
            torch.cat(parts, 2, out=moved.unflatten(1, (self._rows, -1)))
        else:
            rebuild(storage, current, change.source, moved)
        return moved, ticket

    def _predict_ring_slots(self, schedule: Schedule) -> int:
        """Return the slots that one sequence's storage needs; where data decides, what a strict budget lets it have."""
        spec, method = self._spec, self._method
        lengths = predict_row_lengths(spec, method, schedule)
        if lengths is None:
            if not method.strict:
                return 0
            arriving = max(count_free_slots(spec, at.index) for at in spec.segments) * spec.all_heads
            return 2 * (ceil(REBUILD_BOUND * method.budget.capacity) + arriving)
        return predict_ring_slots(spec, lengths)
