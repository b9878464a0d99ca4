"""KV cache: attention over the tokens that a method kept, exact-size storage, a strict budget and a ledger."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor

from kvbench.core.graphs import GraphRecorder, Repetitions
from kvbench.core.segments import ModelSpec, Segment
from kvbench.engine.bias import narrow, widen, widen_queries
from kvbench.engine.coding.formats import CodebookTensors, Packing
from kvbench.engine.layer import LayerInputs, LayerStore
from kvbench.engine.ledger import Ledger
from kvbench.engine.packed.storage import PackedStorage
from kvbench.engine.padding import Padding, ask_plans, attend_padded, follow_schedule, read_padding
from kvbench.engine.plain import PlainStorage
from kvbench.engine.retention import CacheSnapshot
from kvbench.engine.schedule import Change, Schedule, ask_attended, ask_method, build_schedule, show_layer
from kvbench.engine.sparse_attention import attend_selected
from kvbench.engine.storage import CacheBackend
from kvbench.engine.view import CacheView
from kvbench.kernels.layout import Layout
from kvbench.methods.shared.base import Method


class KVCache:
    """Keys and values of one batch of generations after another, kept as a method decides.

    Attributes:
        prompts: numbers of the prompts of the next generations, for methods that draw at random; 0, 1, ... by default.
        ledger: of the current generation, or of the last one.
        record: records a segment's steps for the model that runs them; None runs each step by itself.
        repetitions: of segments whose tokens come at once, under a static method and with a `record`; otherwise None.
        projection: returns the model's output projection of a layer, [width, query heads x D]; None if the model does
            not expose it.

    Args:
        spec: the model's shapes.
        method: prepared for that model and its budget.
        dtype: of stored keys and values; for low-bit storage, the dtype they are decoded to.
        device: of the storage.
        record: see above.
        projection: see above.
        packing: format of low-bit storage; None stores numbers of `dtype`.
        rotation: RoPE factors, complex64 [positions, D/2]; None without RoPE or if the model does not expose them.
        books: static codebooks, for the storage or an observer.
    """

    def __init__(
        self,
        spec: ModelSpec,
        method: Method,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        record: GraphRecorder | None = None,
        projection: Callable[[int], Tensor | None] | None = None,
        packing: Packing | None = None,
        rotation: Tensor | None = None,
        books: CodebookTensors | None = None,
    ) -> None:
        self.spec, self.method, self.record, self.projection = spec, method, record, projection
        self.prompts: Sequence[int] | None = None
        self._uses, self._device = method.uses, torch.device(device)
        self._rotation = None if rotation is None else rotation.to(self._device)
        self._books = {name: book.to(self._device) for name, book in (books or {}).items()}
        self._schedule: Schedule = {}
        self._storage: CacheBackend
        self._plain: PlainStorage | None = None
        if packing is None:
            self._storage = self._plain = PlainStorage(spec, method, dtype, self._device)
        else:
            packed = (packing, dtype, self._device, self._rotation, self._books)
            self._storage = PackedStorage(spec, method, *packed)
        # Tokens of the segment before the step: on the device, for kernels, and the same number on the host.
        self._filled, self._host_filled = torch.zeros(1, dtype=torch.int64, device=self._device), 0
        self.repetitions: Repetitions | None = None
        at_once = not any(segment.causal for segment in spec.segments)
        if record is not None and self._plain is not None and method.static and at_once:
            self.repetitions = Repetitions(record, self._save)
        self.reset(0)

    def reset(self, sequences: int, padding: Sequence[int] | None = None) -> None:
        """Start a generation and its ledger; all contents are dropped.

        Args:
            sequences: in the batch.
            padding: padding tokens in front of each sequence's prompt; the prompt then comes in one step. Padding is
                neither attended to nor stored. None if all prompts are equally long.

        Raises:
            ValueError: not one number a sequence, or no token of a prompt would be left.
        """
        spec = self.spec
        self._padding = read_padding(spec, sequences, padding, self._device)
        # Rows that keep the same slots in all sequences share a layout.
        shared = self.method.static and self._padding is None
        self._sequences = sequences
        self._batch, self._rows = (sequences, spec.heads) if shared else (1, spec.heads * sequences)
        self.ledger = Ledger.open(spec, self._rows // spec.heads, observes_lse=self._uses.lse_queries > 0)
        if self._padding is not None:
            self.ledger.prompts = self._padding.prompts
            self.method.forget_plans(self._padding.prompts)
        self._stores: list[LayerStore] = []
        self._waiting: list[LayerInputs] = []  # layers of a full segment, until a joint decision
        self._last_layouts: list[Layout] = []  # layouts at the start of the last segment, which stores none
        if sequences:
            if self.method.static and not self._schedule:
                self._schedule = build_schedule(
                    spec, self.method, self._device, self._storage.find_free_slots
                )
            arena = None if self._plain is None else self._plain.arena
            self._storage.prepare(sequences, self._batch, self._rows, self._schedule)
            if self.repetitions is not None and self._plain is not None and self._plain.arena is not arena:
                self.repetitions.clear()
            free_slots = self._storage.find_free_slots(0)
            self._stores = [self._storage.allocate_layer(layer, free_slots) for layer in range(spec.layers)]

    def release(self) -> None:
        """Free all storage of keys and values after the last token; the ledger stays.

        Nothing is freed if steps are recorded, because they are repeated on the same storage.
        """
        if self.record is not None:
            return
        self._last_layouts = self._last_layouts or [store.layout for store in self._stores]
        self._stores = []
        self._storage.release()

    def forget(self) -> None:
        """Drop all contents and recordings, to free memory after it ran out."""
        self.reset(0)
        self._storage.release()
        if self.repetitions is not None:
            self.repetitions.clear()
        if self.record is not None:
            self.record.clear()

    def begin(self, segment: Segment) -> None:
        """Announce the segment whose tokens every layer will see next: at once, or in steps if it is causal."""
        self._segment = segment
        self._last_layouts = [store.layout for store in self._stores] if segment.last else []
        if segment.causal:
            self._filled.zero_()
            self._host_filled = 0
            slot_bytes = sum(store.slot_bytes for store in self._stores)
            self.ledger.pending_bytes = segment.length * self._rows * slot_bytes
            self.ledger.record_transient(self._storage.max_read_bytes)

    @property
    def segment(self) -> Segment:
        """The segment that began last."""
        return self._segment

    @property
    def held(self) -> CacheSnapshot:
        """Contents of the cache at the beginning of the current segment."""
        layouts = self._last_layouts or [store.layout for store in self._stores]
        return CacheSnapshot(self._segment, layouts, self._padding)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, raw_queries: Callable[[], Tensor] | None = None
    ) -> Tensor:
        """Attend over the layer's kept past and the current segment; once that is full, let the method prune the layer.

        Args:
            layer: index of the layer.
            q: [sequences, query heads, tokens, D]; query heads may be a multiple of the KV heads.
            k: keys [sequences, heads, tokens, D].
            v: values, shaped like k.
            raw_queries: computes the queries as projected, shaped like q; called only if the method reads them.

        Returns:
            [sequences, query heads, tokens, D] in q's dtype.

        Raises:
            BudgetExceeded: the cache of a strict method holds more than its budget after this layer.
            ValueError: more tokens than the segment has, or a part of a segment whose tokens come at once.
        """
        if self._uses.bias:
            q, k, v, raw_queries = widen_queries(q, self.spec.logit_scale), widen(k), widen(v), None
        present = LayerInputs(
            layer,
            q.reshape(len(q), self.spec.heads, -1, q.shape[3]),
            k,
            v,
            self._stores[layer],
            self.spec.logit_scale,
            causal=self._segment.causal,
            raw_queries=raw_queries,
            biased=self._uses.bias,
            projection=self.projection,
            rotation=self._rotation,
            books=self._books,
        )
        out = self._attend_step(present) if self._segment.causal else self._attend_at_once(present)
        out = out.reshape(q.shape)
        return narrow(out) if self._uses.bias else out

    def _attend_at_once(self, present: LayerInputs) -> Tensor:
        """Attend with a whole segment whose tokens see each other."""
        self._check_length(present)
        self.ledger.pending_bytes = present.k.nbytes + present.v.nbytes
        # On a GPU attention computes the log-sum-exp for methods that read data.
        attends_first = present.q.is_cuda and not self.method.static
        if self._segment.last or attends_first or self._uses.sparse_reads:
            out, lse = self._attend_slots(present)
            self._finish(present._replace(lse=lse))
            return out
        change = self._find_change(present)
        if not self._storage.can_append(change, present.q.dtype):
            out, _ = self._attend_slots(present)
            self._store(present, change)
            return out
        # Nothing leaves: one attention over the new storage, which holds past and present, is faster.
        return self._storage.attend_appended(self._store(present, change), present.q)

    def _attend_slots(self, present: LayerInputs) -> tuple[Tensor, Tensor | None]:
        """Attend to past and present, or to the slots of both that the method selects."""
        if self._uses.sparse_reads:
            view = self._show(present)
            selected = ask_attended(self.method, view)
            if selected is not None:
                out, copied = attend_selected(present.q, view, selected, self.spec.logit_scale)
                self.ledger.pending_bytes += copied
                return out, None
        return self._storage.attend(present.store, *present[1:4])

    def _attend_step(self, present: LayerInputs) -> Tensor:
        """Attend with the next tokens of a causal segment, and finish the segment with its last one."""
        store, length, q = present.store, self._segment.length, present.q
        filled, tokens = store.filled, present.k.shape[2]
        if filled + tokens > length:
            raise ValueError(
                f"segment {self._segment.index}: token {filled + tokens} came, it has {length} tokens"
            )
        if self._padding is not None and not self._segment.index:
            return self._attend_padded(present, self._padding)
        if filled != self._host_filled:  # once a step; an addition, which a recorded step can repeat
            self._filled.add_(filled - self._host_filled)
            self._host_filled = filled
        out = self._storage.attend_step(store, *present[1:4], length, self._filled)
        store.filled += tokens
        self.ledger.record_transient(self._storage.max_read_bytes)
        if not self.method.static and tokens < length:
            queries = store.add_queries(q, tokens, length, self._filled)
            present = present._replace(q=queries, raw_queries=None)
        if tokens == 1 and self._uses.sparse_reads:
            out = self._attend_step_sparsely(present, q, out)
        if store.filled == length:
            k, v = self._storage.view_pending(store, length)
            self._finish(present._replace(k=k, v=v))
        return out

    def _attend_step_sparsely(self, present: LayerInputs, q: Tensor, out: Tensor) -> Tensor:
        """Attend with a step's token to the slots that the method selects, instead of all slots.

        Args:
            present: the layer, with room for all queries of the segment; those so far are set.
            q: the token's queries [sequences, heads, queries, D].
            out: output of attention to all slots.
        """
        filled, length = present.store.filled, self._segment.length
        keys, values = (x[:, :, :filled] for x in self._storage.view_pending(present.store, length))
        queries = present.q.unflatten(2, (-1, length))[:, :, :, :filled].flatten(2, 3)
        view = self._show(present._replace(q=queries, k=keys, v=values), self._segment._replace(width=filled))
        selected = ask_attended(self.method, view)
        if selected is None:
            return out
        out, copied = attend_selected(q, view, selected, self.spec.logit_scale)
        self.ledger.record_transient(copied)
        return out

    def _save(self) -> Callable[[], None]:
        """Return a function that restores the host's present bookkeeping after a device repeated a segment alone."""
        assert self._plain is not None
        stores, restore_arena = [replace(store) for store in self._stores], self._plain.arena.save()
        ledger = deepcopy(self.ledger)

        def restore() -> None:
            self._stores, self.ledger = [replace(store) for store in stores], ledger
            restore_arena()

        return restore

    def advance(self) -> None:
        """Count a token whose recorded step was repeated without a call of `attend`."""
        for store in self._stores:
            store.filled += 1
        self._host_filled += 1

    def _attend_padded(self, present: LayerInputs, padding: Padding) -> Tensor:
        """Attend with prompts of unequal length, whose tokens come at once."""
        self._check_length(present)
        out = attend_padded(present.q, present.k, present.v, padding, self.spec.logit_scale)
        self._storage.fill(present.store, present.k, present.v)
        self._finish(present)
        return out

    def _check_length(self, present: LayerInputs) -> None:
        tokens, length = present.k.shape[2], self._segment.length
        if tokens != length:
            what = "padded prompts must come at once" if self._padding else f"segment {self._segment.index}"
            raise ValueError(f"{what}: {tokens} tokens came of {length}")

    def _finish(self, present: LayerInputs) -> None:
        """Apply the method's choice to a layer. Store nothing of the last segment."""
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
        """Collect the layers of a segment, and decide about all after the last one.

        Until then a layer holds what it held before; its queries and pending tokens wait.
        """
        store = present.store
        if store.queries is None:  # all tokens came in one step
            store.queries = present.q.unflatten(2, (-1, self._segment.length))
        self._waiting.append(present)
        if self._plain is not None and self._padding is not None:
            # Padded prompts wait beside their copies in the storage, pending tokens of unequal rows as copies.
            copies = (one for one in self._waiting if not (self._segment.index and one.store.layout.uniform))
            self.ledger.record_transient(sum(one.k.nbytes + one.v.nbytes for one in copies))
        self._record(present.layer)
        if len(self._waiting) < self.spec.layers:
            return
        layers, self._waiting = self._waiting, []
        self.method.compare_layers([self._show(layer) for layer in layers])
        for layer in layers:
            self._store(layer, self._find_change(layer))

    def _find_change(self, present: LayerInputs) -> Change:
        layout = present.store.layout
        free_slots = self._storage.find_free_slots(self._segment.index + 1)
        if self.method.static:
            change, padding = self._schedule[present.layer, self._segment.index], self._padding
            if padding is None:
                return change
            if self.spec.padding_counts:  # as a part of the prompt
                return follow_schedule(change, self._segment, layout, padding, free_slots)
            return ask_plans(
                self.method, self.spec, present.layer, self._segment, layout, padding, free_slots
            )
        return ask_method(self.method, self._show(present), layout, free_slots)

    def _show(self, present: LayerInputs, segment: Segment | None = None) -> CacheView:
        """Return the view of a layer after the current segment, or after a part of it."""
        store, spec, segment = present.store, self.spec, segment or self._segment
        if self.method.static:
            return show_layer(present.layer, segment, store.layout, spec, self._rows // spec.heads)
        state = store.state
        if state is None and (numbers := self._uses.state):
            state = torch.zeros(self._rows, 0, *[numbers] * (numbers > 1), device=self._device)
        prompts = range(self._sequences // spec.branches) if self.prompts is None else self.prompts
        prompts = [*prompts] * spec.branches
        padding, lengths = (
            (None, ()) if self._padding is None else (self._padding.rows, self._padding.prompts)
        )
        given = (present, state, prompts, padding, lengths)
        return show_layer(present.layer, segment, store.layout, spec, self._sequences, *given)

    def _store(self, present: LayerInputs, change: Change) -> LayerStore:
        """Change a layer's storage and record it."""
        layer, before = present.layer, present.store.bytes
        after = self._storage.change(layer, present.store, (present.k, present.v), self._segment, change)
        peak = self._storage.find_rebuild_peak(before, after.bytes)
        self.ledger.record_rebuild(before, after.bytes, peak)
        self.ledger.record_drift(self._segment.index, change.drift)
        if change.unprotected is not None:
            self.ledger.record_unprotected(change.unprotected)
        if self._uses.previous_keys and self.method.compares_keys(layer, self._segment):
            after.previous_keys = present.k.clone()  # a view would keep the whole projection alive
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
