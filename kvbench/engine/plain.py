"""Unquantised storage (16 or 32 bits) of exact size, in one ring buffer for the keys and values of all layers."""

from collections.abc import Sequence
from fractions import Fraction
from math import ceil

import torch
from torch import Tensor

from kvbench.core.segments import ModelSpec, Segment
from kvbench.engine.arena import Arena
from kvbench.engine.layer import LayerStore
from kvbench.engine.memory import BIAS_CHANNELS
from kvbench.engine.row_tables import RowTables
from kvbench.engine.schedule import (
    Ints,
    Schedule,
    StorageChange,
    count_free_slots,
    predict_ring_slots,
    predict_row_lengths,
)
from kvbench.engine.storage import CacheBackend
from kvbench.kernels.compact import move_slots, rebuild, rebuild_both
from kvbench.kernels.decode_attention import decode_attention, decode_token, prepare_rows
from kvbench.kernels.layout import Layout, empty_layout, fold_rows, view_free_slots, view_group
from kvbench.kernels.ragged_attention import dense_attention, ragged_attention
from kvbench.methods.shared.base import Method

REBUILD_BOUND = Fraction(11, 10)
"""Size of the ring in units of B if lengths of rows depend on data; blocks that do not fit are stored outside."""


class PlainStorage(CacheBackend):
    """Unquantised keys and values of all layers, attended in place.

    Attributes:
        arena: ring buffer of keys and values; replaced when a generation needs a larger one.

    Args:
        spec: the model's shapes.
        method: a prepared method.
        dtype: dtype of the stored keys and values.
        device: device of the storage.
        fixed: whether a recording or a kernel reads the offsets of rows from tables (`locate_rows`).
    """

    def __init__(
        self,
        spec: ModelSpec,
        method: Method,
        dtype: torch.dtype,
        device: torch.device,
        *,
        fixed: bool = False,
    ) -> None:
        self._fixed = fixed
        self._spec, self._method, self._dtype, self._device = spec, method, dtype, device
        self._channels = spec.head_dim + (BIAS_CHANNELS if method.uses.bias else 0)
        self.arena = Arena(0, dtype, device)
        self._moved_both = False  # whether the last rebuild moved keys and values together
        self._grown = False  # whether the last rebuild moved nothing
        self._ring: int | None = None  # slots of a sequence that the arena must hold; None until known
        self._longest = 0  # slots of a generation's longest row
        self._tables: dict[int, RowTables] = {}  # tables by number of rows
        self._layouts: dict[tuple[int, int], Layout] = {}  # empty layouts, by rows and free slots

    def prepare(self, sequences: int, batch: int, rows: int, schedule: Schedule) -> None:
        """Clear the ring, and enlarge it if this generation may hold more than earlier ones."""
        self._batch, self._rows = batch, rows
        if self._ring is None:
            lengths = predict_row_lengths(self._spec, self._method, schedule)
            self._ring, self._longest = self._predict_ring_slots(lengths), self._predict_longest(lengths)
        size = self._ring * sequences * self._channels
        if size > self.arena.size:
            self.arena = Arena(0, self._dtype, self._device)  # frees the old ring before the new one is made
            self.arena = Arena(size, self._dtype, self._device)
        self.arena.clear()

    def find_free_slots(self, index: int) -> int:
        """Return the segment's tokens, or with `fixed` all later tokens too if the method keeps everything."""
        segments = self._spec.segments
        if not self._fixed or self._method.budgeted or not segments[index].causal:
            return count_free_slots(self._spec, index)
        return segments[-1].end - segments[index].start

    def allocate_layer(self, layer: int, free_slots: int = 0) -> LayerStore:
        key = (self._rows, free_slots)
        if key not in self._layouts:
            self._layouts[key] = empty_layout(self._rows, self._device, free_slots)
        layout = self._layouts[key]
        shape = (self._batch, layout.capacity, self._channels)
        blocks = [self.arena.take(shape) for _ in ("keys", "values")]
        for tensor, _ in blocks:
            tensor.zero_()  # padded rows read free slots before they are filled
        (keys, first), (values, second) = blocks
        return LayerStore(layout, keys, values, (first, second))

    def free_layer(self, store: LayerStore) -> None:
        for handle in store.handles:
            self.arena.release(handle)

    def release(self) -> None:
        """Free the ring and all blocks."""
        self.arena = Arena(0, self._dtype, self._device)

    def attend(self, store: LayerStore, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        return ragged_attention(q, k, v, store.past, self._spec.logit_scale)

    def can_append(self, change: StorageChange, dtype: torch.dtype) -> bool:
        return change.appends and self._dtype == dtype

    def attend_appended(self, store: LayerStore, q: Tensor) -> Tensor:
        (group,) = store.layout.groups
        shape = (*q.shape[:2], group.length, -1)
        keys, values = (view_group(x, group).view(shape) for x in (store.keys, store.values))
        return dense_attention(q, keys, values, self._spec.logit_scale)

    def attend_step(
        self, store: LayerStore, q: Tensor, k: Tensor, v: Tensor, length: int, filled: Tensor
    ) -> Tensor:
        """Attend with the next tokens of a causal segment, and write them to the free slots behind the rows."""
        queries, keys, values = (self._fold(x) for x in (q, k, v))
        scale = self._spec.logit_scale
        if store.placed is not None and k.shape[2] == 1:
            return decode_token(queries, keys, values, store.placed, scale).reshape(q.shape)
        if store.rows is None:
            store.rows = prepare_rows(store.past)
        return decode_attention(queries, keys, values, store.rows, store.filled, scale).reshape(q.shape)

    def locate_rows(self, stores: Sequence[LayerStore], filled: Tensor) -> bool:
        if self._rows not in self._tables:
            self._tables[self._rows] = RowTables(len(stores), self._rows, self._longest, self._device)
        return self._tables[self._rows].update(stores, self.arena, filled)

    def fill(self, store: LayerStore, k: Tensor, v: Tensor) -> None:
        """Write all tokens of a causal segment to the free slots behind the rows."""
        for storage, new in ((store.keys, k), (store.values, v)):
            view_free_slots(storage, store.layout, 0, new.shape[2]).copy_(self._fold(new))

    def view_pending(self, store: LayerStore, length: int) -> tuple[Tensor, Tensor]:
        slots = (view_free_slots(x, store.layout, 0, length) for x in (store.keys, store.values))
        keys, values = (x.reshape(-1, self._spec.heads, *x.shape[2:]) for x in slots)
        return keys, values

    def change(
        self,
        layer: int,
        store: LayerStore,
        present: tuple[Tensor, Tensor],
        segment: Segment,
        change: StorageChange,
    ) -> LayerStore:
        contents = change.contents
        self._grown = self._grows(store.layout, segment, change)
        if self._grown:
            return LayerStore(change.layout, store.keys, store.values, store.handles, state=change.state)
        shape = (self._batch, change.layout.capacity, store.keys.shape[2])
        self._moved_both = store.keys.is_cuda and not store.layout.free_slots and contents is None
        if self._moved_both and self.arena.fits(2 * torch.Size(shape).numel()):
            (keys, first), (values, second) = (self.arena.take(shape) for _ in ("keys", "values"))
            rebuild_both((store.keys, store.values), present, change.source, (keys, values))
            self.free_layer(store)
            return LayerStore(change.layout, keys, values, (first, second), state=change.state)
        self._moved_both = False
        direct = (change.appends and not change.layout.free_slots) or store.layout.free_slots
        if joined := None if direct else store.joined:
            change = change._replace(source=joined.find_origins(change.source))
        parts = (None, None) if joined is None else joined.buffer
        # Keys before values: the old keys are released before the new values are allocated.
        keys, first = self._move(store.keys, store, present[0], parts[0], change)
        if contents is not None:
            keys.copy_(contents.keys)
        self.arena.release(store.handles[0])
        store.keys = keys
        values, second = self._move(store.values, store, present[1], parts[1], change)
        if contents is not None:
            values.copy_(contents.values)
        self.arena.release(store.handles[1])
        return LayerStore(change.layout, keys, values, (first, second), state=change.state)

    def find_rebuild_peak(self, before: int, after: int) -> int:
        if self._grown:
            return after
        if self._moved_both:
            return before + after
        return max(before + after // 2, before // 2 + after)

    def _grows(self, layout: Layout, segment: Segment, change: StorageChange) -> bool:
        """Return whether the segment's tokens stay in the free slots that they fill, so that no slot moves."""
        after, tokens = change.layout, len(layout.counts) * segment.length
        fits = layout.free_slots >= segment.length and after.free_slots == layout.free_slots - segment.length
        return fits and after.total == layout.total + tokens and change.contents is None

    def _move(
        self,
        storage: Tensor,
        store: LayerStore,
        current: Tensor,
        joined: Tensor | None,
        change: StorageChange,
    ) -> tuple[Tensor, int | None]:
        """Copy the kept slots of a layer's keys or values to new storage."""
        moved, handle = self.arena.take((self._batch, change.layout.capacity, storage.shape[2]))
        if store.layout.free_slots or joined is not None:
            move_slots(storage if joined is None else joined, change.source, moved)
        elif change.appends and not storage.is_cuda and not change.layout.free_slots:
            # Only on a CPU is copying without an index table faster.
            rows = (len(current) // self._batch, current.shape[1])
            past = storage.unflatten(1, (*rows, storage.shape[1] // self._rows)).to(self._dtype)
            new = current.unflatten(0, (self._batch, rows[0])).to(self._dtype)
            torch.cat((past, new), 3, out=moved.unflatten(1, (*rows, -1)))
        else:
            rebuild(storage, current, change.source, moved)
        return moved, handle

    def _fold(self, x: Tensor) -> Tensor:
        """Turn [S, H, tokens, D] into rows [B, R, tokens, D]."""
        return fold_rows(x, self._batch, self._rows)

    def _predict_ring_slots(self, lengths: Ints | None) -> int:
        """Return the slots of a sequence that the ring must hold; a bound by the budget if lengths depend on data."""
        spec, method = self._spec, self._method
        if lengths is not None:
            return predict_ring_slots(spec, lengths, self.find_free_slots)
        if not (method.strict or self._fixed):
            return 0
        capacity, bound = method.budget.capacity, REBUILD_BOUND
        pending = max(count_free_slots(spec, segment.index) for segment in spec.segments) * spec.all_heads
        if self._fixed:  # keys of two more layers of mean size, with free slots
            return 2 * ceil(max(bound, 1 + Fraction(1, spec.layers)) * (capacity + pending))
        return 2 * (ceil(bound * capacity) + pending)

    def _predict_longest(self, lengths: Ints | None) -> int:
        """Return the slots of a generation's longest row, free ones included; all tokens if lengths depend on data."""
        segments = self._spec.segments
        if lengths is None:
            return segments[-1].end
        held = [0, *lengths.max((1, 2)).tolist()]
        return max(rows + self.find_free_slots(at.index) for rows, at in zip(held, segments, strict=True))
