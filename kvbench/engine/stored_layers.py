"""Storage of all layers for one batch of generations, changed after each segment as a method decides."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.core.segments import ModelSpec, Segment
from kvbench.engine.coding.formats import CodebookTensors
from kvbench.engine.layer import LayerInputs, LayerStore
from kvbench.engine.ledger import Ledger
from kvbench.engine.padding import Padding, follow_schedule, plan_padded_change
from kvbench.engine.plain import PlainStorage
from kvbench.engine.recorded_scales import plan_recorded_change
from kvbench.engine.recording.repetitions import Repetitions
from kvbench.engine.retention import CacheSnapshot
from kvbench.engine.schedule import Schedule, StorageChange, apply_keep, call_keep, show_layer
from kvbench.engine.storage import CacheBackend
from kvbench.engine.view import CacheView
from kvbench.kernels.layout import Layout
from kvbench.methods.shared.base import Method


class Unchanged(NamedTuple):
    """Data shared by layers that hold the same slots and drop none of them after a segment.

    Attributes:
        before: layout before the segment is stored.
        position: `View.position` after the segment.
        change: storage change.
    """

    before: Layout
    position: Tensor
    change: StorageChange


class StoredLayers:
    """Storage of all layers, its ledger, and what a method's choices change in it.

    Attributes:
        prompts: indices of the next generations' prompts in the run, for random methods; None for 0, 1, ...
        ledger: ledger of the current generation, or of the last one.
        repetitions: repetitions of recorded work; None if nothing is recorded.
        projection: returns the model's output projection of a layer, [width, query heads x D]; None if the model does
            not expose it.

    Args:
        spec: the model's shapes.
        method: a method prepared for that model and a budget.
        storage: storage of keys and values.
        device: device of the storage.
        projection: see above.
        rotation: RoPE factors on the device, complex64 [positions, D/2]; None without RoPE or if the model does not
            expose them.
        codebooks: static codebooks on the device, for an observer.
    """

    ledger: Ledger
    repetitions: Repetitions | None
    _segment: Segment
    _padding: Padding | None
    _stores: list[LayerStore]
    _waiting: list[LayerInputs]  # layers of a full segment, before a joint decision
    _last_layouts: list[Layout]  # layouts at the start of the last segment, which stores none
    _sequences: int
    _rows: int
    _unchanged: Unchanged | None  # shared by layers of a segment that keep the same slots

    def __init__(
        self,
        spec: ModelSpec,
        method: Method,
        storage: CacheBackend,
        device: torch.device,
        projection: Callable[[int], Tensor | None] | None,
        rotation: Tensor | None,
        codebooks: CodebookTensors,
    ) -> None:
        self.spec, self.method, self.projection = spec, method, projection
        self.prompts: Sequence[int] | None = None
        self._uses, self._device = method.uses, device
        self._rotation, self._codebooks = rotation, codebooks
        self._schedule: Schedule = {}
        self._storage = storage
        self._plain = storage if isinstance(storage, PlainStorage) else None

    @property
    def segment(self) -> Segment:
        """The segment that was announced last."""
        return self._segment

    @property
    def held(self) -> CacheSnapshot:
        """Contents of the cache at the beginning of the current segment."""
        layouts = self._last_layouts or [store.layout for store in self._stores]
        return CacheSnapshot(self._segment, layouts, self._padding)

    def _finish(self, present: LayerInputs) -> None:
        """Let the method prune a layer; of the last segment, store nothing."""
        if not self._segment.last:
            if self._uses.joint:
                self._wait(present)
            else:
                self._store(present, self._find_change(present))
            return
        if self._uses.last_segment:
            self.method.keep(self._show(present))
        self._record(present.layer)
        self.ledger.record_rebuild(present.store.bytes, 0)
        self._storage.free_layer(present.store)
        self._stores[present.layer] = self._storage.allocate_layer(present.layer)

    def _wait(self, present: LayerInputs) -> None:
        """Collect the layers of a segment, and let the method prune all of them after the last one.

        Until then a layer's storage is unchanged; its queries and pending tokens wait.
        """
        store = present.store
        if store.queries is None:  # all tokens came in one step
            store.queries = present.q.unflatten(2, (-1, self._segment.length))
        self._waiting.append(present)
        if self._plain is not None and self._padding is not None:
            # Padded prompts are in the storage too. Later tokens wait as copies, or as views if rows are equally long.
            copies = (one for one in self._waiting if not (self._segment.index and one.store.layout.uniform))
            self.ledger.record_transient(sum(one.k.nbytes + one.v.nbytes for one in copies))
        self._record(present.layer)
        if len(self._waiting) < self.spec.layers:
            return
        layers, self._waiting = self._waiting, []
        self.method.compare_layers([self._show(layer) for layer in layers])
        for layer in layers:
            self._store(layer, self._find_change(layer))

    def _find_change(self, present: LayerInputs) -> StorageChange:
        layout = present.store.layout
        free_slots = self._storage.find_free_slots(self._segment.index + 1)
        if self.method.static:
            change, padding = self._schedule[present.layer, self._segment.index], self._padding
            if padding is None:
                return change
            if self.spec.padding_counts:  # the schedule counts padding as part of the prompt
                return follow_schedule(change, self._segment, layout, padding, free_slots)
            return plan_padded_change(
                self.method, self.spec, present.layer, self._segment, layout, padding, free_slots
            )
        view = self._show(present)
        if self.repetitions is None or self._segment.causal:
            return self._plan_change(view, layout, free_slots)
        return plan_recorded_change(self.method, view, layout, recording=self.repetitions.recording)

    def _plan_change(self, view: CacheView, layout: Layout, free_slots: int) -> StorageChange:
        """Return the storage change that a method makes; layers that keep all of equal slots share it."""
        keep, known = call_keep(self.method, view), self._unchanged
        if keep is None and known is not None and known.before is layout:
            return known.change._replace(state=view.state if self._uses.state else None)
        change = apply_keep(self.method, view, keep, layout, free_slots)
        if keep is None and layout.uniform and self._padding is None and not self._uses.lse_queries:
            self._unchanged = Unchanged(layout, view.position, change)
        return change

    def _show(self, present: LayerInputs, segment: Segment | None = None) -> CacheView:
        """Return the view of a layer after the current segment, or after `segment`, a part of it."""
        store, spec, segment = present.store, self.spec, segment or self._segment
        if self.method.static:
            return show_layer(present.layer, segment, store.layout, spec, self._rows // spec.heads)
        state = store.state
        if state is None and (count := self._uses.state):
            state = torch.zeros(self._rows, 0, *[count] * (count > 1), device=self._device)
        prompts = range(self._sequences // spec.branches) if self.prompts is None else self.prompts
        prompts = [*prompts] * spec.branches
        padding, lengths = (
            (None, ()) if self._padding is None else (self._padding.rows, self._padding.prompts)
        )
        known, layout = self._unchanged, store.layout
        position = None if known is None or known.before is not layout else known.position
        given = (present, state, prompts, padding, lengths, position)
        return show_layer(present.layer, segment, layout, spec, self._sequences, *given)

    def _store(self, present: LayerInputs, change: StorageChange) -> LayerStore:
        """Change a layer's storage and record it."""
        layer, before = present.layer, present.store.bytes
        after = self._storage.change(layer, present.store, (present.k, present.v), self._segment, change)
        peak = self._storage.find_rebuild_peak(before, after.bytes)
        self.ledger.record_rebuild(before, after.bytes, peak)
        self.ledger.record_drift(self._segment.index, change.drift)
        if change.unprotected is not None:
            self.ledger.record_unprotected(change.unprotected)
        if self._uses.previous_keys and self.method.compares_keys(layer, self._segment):
            after.previous_keys = present.k.clone()  # a view would keep the memory of the whole projection
        self._stores[layer] = after
        self._record(layer)
        return after

    def _record(self, layer: int) -> None:
        """Record what a layer holds and check the budget."""
        index, static = self._segment.index, self.method.static
        state_bytes = 0 if static else sum(store.state_bytes for store in self._stores)
        self.ledger.record_transient(self._storage.max_read_bytes)
        self.ledger.record_layer(index, layer, self._stores[layer], state_bytes, self.spec)
        self.ledger.check_budget(index, layer, self.method)
