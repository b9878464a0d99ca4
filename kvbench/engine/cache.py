"""KV cache: attention over the tokens that a method kept, exact-size storage, a strict budget and a ledger."""

from collections.abc import Callable, Hashable, Sequence
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.core.segments import ModelSpec, Segment
from kvbench.engine.bias import narrow, widen, widen_queries
from kvbench.engine.coding.formats import CodebookTensors, Packing
from kvbench.engine.layer import LayerInputs, LayerStore
from kvbench.engine.ledger import Ledger
from kvbench.engine.packed.storage import PackedStorage
from kvbench.engine.padding import Padding, attend_padded, cut_padding, cut_queries, read_padding
from kvbench.engine.plain import PlainStorage
from kvbench.engine.recorded_scales import can_record
from kvbench.engine.recording.graphs import GraphRecorder, Repeat
from kvbench.engine.recording.repetitions import Repetitions
from kvbench.engine.schedule import build_schedule
from kvbench.engine.sparse_attention import SparseAttention, attend_sparsely
from kvbench.engine.steps import Steps
from kvbench.engine.stored_layers import StoredLayers
from kvbench.kernels.joined_rows import JoinedRows
from kvbench.kernels.layout import Layout
from kvbench.methods.shared.base import Method


class KVCache(StoredLayers):
    """KV cache for successive batches of generations, pruned by a method.

    Attributes:
        record: records steps, or segments whose tokens come at once; None runs all by launches.
        repetitions: recorded steps, or segments if the method has no `graph_obstacle`; None if nothing is recorded.

    A method may be prepared for shorter prompts than the model takes. All prompts then begin with at least this much
    padding, which is cut off: it has no slots, and positions begin after it.

    Args:
        spec: the model's shapes.
        method: a method prepared for that model, or for shorter prompts, and for a budget.
        dtype: dtype of stored keys and values; for low-bit storage, the dtype they are decoded to.
        device: device of the storage.
        record: see above.
        projection: see `StoredLayers`.
        packing: format of low-bit storage; None stores values of `dtype`.
        rotation: RoPE factors, complex64 [positions, D/2]; None without RoPE or if the model does not expose them.
        codebooks: static codebooks for the storage or an observer; None if neither uses them.
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
        codebooks: CodebookTensors | None = None,
    ) -> None:
        self.record, device = record, torch.device(device)
        spec = spec.with_prompt(method.spec.segments[0].length)
        self._cut = spec.origin
        self._fixed = packing is None and (device.type == "cuda" or record is not None)
        rotation = None if rotation is None else rotation[self._cut :].to(device)
        placed_codebooks = {name: codebook.to(device) for name, codebook in (codebooks or {}).items()}
        storage: PlainStorage | PackedStorage
        if packing is None:
            storage = PlainStorage(spec, method, dtype, device, fixed=self._fixed)
        else:
            storage = PackedStorage(spec, method, packing, dtype, device, rotation, placed_codebooks)
        super().__init__(spec, method, storage, device, projection, rotation, placed_codebooks)
        self._steps = Steps(spec.segments, self._device)
        self.repetitions: Repetitions | None = None
        if record is not None and self._plain is not None:
            if can_record(spec, method):
                self.repetitions = Repetitions(record, self._save)
            elif any(segment.causal for segment in spec.segments) and not self._uses.sparse_reads:
                self.repetitions = Repetitions(record, lambda: lambda: None)  # the host counts steps itself
        self.reset(0)

    def reset(self, sequences: int, padding: Sequence[int] | None = None) -> None:
        """Start a generation and its ledger; all contents are dropped.

        Args:
            sequences: number of sequences in the batch.
            padding: padding tokens in front of each sequence's prompt; the prompt then comes in one step. Padding is
                neither attended to nor stored. None if all prompts are equally long.

        Raises:
            ValueError: `padding` lacks a value per sequence, leaves a prompt no token, or is too small for the method.
        """
        spec = self.spec
        padding = cut_padding(self._cut, sequences, padding)
        self._padding = read_padding(spec, sequences, padding, self._device)
        # Rows that keep the same slots in all sequences share a layout.
        shared = self.method.static and self._padding is None
        self._sequences = sequences
        self._batch, self._rows = (sequences, spec.heads) if shared else (1, spec.heads * sequences)
        self.ledger = Ledger.open(spec, self._rows // spec.heads, observes_lse=self._uses.lse_queries > 0)
        if self._cut:
            self.ledger.prompts = [spec.segments[0].length] * sequences
        if self._padding is not None:
            self.ledger.prompts = self._padding.prompts
            self.method.forget_plans(self._padding.prompts)
        self._stores: list[LayerStore] = []
        self._waiting: list[LayerInputs] = []  # layers of a full segment, before a joint decision
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

        Nothing is freed if steps are recorded, because replays need the same storage.
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
        self._steps.clear()
        if self.repetitions is not None:
            self.repetitions.forget()
        elif self.record is not None:
            self.record.clear()

    @property
    def holds_recordings(self) -> bool:
        """Whether recordings may hold memory that generations without them do not need."""
        return self.repetitions is not None and self.repetitions.holds_memory

    def begin(self, segment: Segment) -> None:
        """Announce the segment whose tokens every layer gets next: at once, or in steps if it is causal."""
        segment = self.spec.segments[segment.index] if self._cut else segment
        self._segment, self._unchanged = segment, None
        self._last_layouts = [store.layout for store in self._stores] if segment.last else []
        self._slot_bytes = self._stores[0].slot_bytes // self._batch
        if segment.causal:
            self._steps.begin()
            self._placed = (
                self._fixed
                and segment.index > 0
                and self._storage.locate_rows(self._stores, self._steps.filled)
            )
            slot_bytes = sum(store.slot_bytes for store in self._stores)
            self.ledger.pending_bytes = segment.length * self._rows * slot_bytes
            self.ledger.record_transient(self._storage.max_read_bytes)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, raw_queries: Callable[[], Tensor] | None = None
    ) -> Tensor:
        """Attend over the layer's kept past and the current segment; once that is full, let the method prune the layer.

        Args:
            layer: index of the layer.
            q: [sequences, query heads, tokens, D]; query heads may be a multiple of the KV heads.
            k: keys [sequences, heads, tokens, D].
            v: values, shaped like k.
            raw_queries: returns the queries as projected, shaped like q; called only if the method reads them.

        Returns:
            [sequences, query heads, tokens, D] in q's dtype.

        Raises:
            BudgetExceeded: the cache of a strict method holds more than its budget after this layer.
            ValueError: there are more tokens than the segment has, or fewer where all must come at once.
        """
        cut = 0 if self._segment.index else self._cut
        if cut:
            q, k, v = (x[:, :, cut:].contiguous() for x in (q, k, v))
            raw_queries = cut_queries(raw_queries, cut)
        if self._uses.bias:
            q, k, v, raw_queries = widen_queries(q, self.spec.logit_scale), widen(k), widen(v), None
        present = self._join(layer, q.reshape(len(q), self.spec.heads, -1, q.shape[3]), k, v, raw_queries)
        if layer == 0 and not self._steps.recorded:
            self._record_step(present.store.filled)
        attend = self._attend_at_once
        if self._segment.causal:
            attend = self._attend_recorded if self._steps.recorded else self._attend_step
        out = attend(present).reshape(q.shape)
        out = narrow(out) if self._uses.bias else out
        return F.pad(out, (0, 0, cut, 0)) if cut else out

    def _record_step(self, filled: int) -> None:
        """Record what a step reads; the segment has `filled` tokens before it."""
        self.ledger.record_step(self._segment, filled, self._slot_bytes, self.spec)

    def _join(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, raw_queries: Callable[[], Tensor] | None = None
    ) -> LayerInputs:
        return LayerInputs(
            layer,
            q,
            k,
            v,
            self._stores[layer],
            self.spec.logit_scale,
            causal=self._segment.causal,
            raw_queries=raw_queries,
            biased=self._uses.bias,
            projection=self.projection,
            rotation=None if layer in self.spec.unrotated else self._rotation,
            codebooks=self._codebooks,
        )

    def _attend_at_once(self, present: LayerInputs) -> Tensor:
        """Attend with a whole segment whose tokens see each other."""
        self._check_length(present)
        self.ledger.pending_bytes = present.k.nbytes + present.v.nbytes
        if self._plain is not None and not present.k.is_cuda and present.k.dtype == present.store.keys.dtype:
            present.store.joined = JoinedRows(present.store.past, present.k, present.v)
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
        # Nothing is evicted: one attention over the new storage, which holds past and present, is faster.
        return self._storage.attend_appended(self._store(present, change), present.q)

    def _attend_slots(self, present: LayerInputs) -> tuple[Tensor, Tensor | None]:
        """Attend to past and present, or to the slots of both that the method selects."""
        if self._uses.sparse_reads:
            sparse = attend_sparsely(self.method, present.q, self._show(present), self.spec.logit_scale)
            if sparse is not None:
                self._record_selection(present.layer, sparse)
                self.ledger.pending_bytes += sparse.copied
                return sparse.out, None
        return self._storage.attend(present.store, *present[1:4])

    def _attend_step(self, present: LayerInputs) -> Tensor:
        """Attend with the next tokens of a causal segment, and finish the segment with its last one."""
        store, length, q = present.store, self._segment.length, present.q
        filled, tokens = store.filled, present.k.shape[2]
        if filled + tokens > length:
            raise ValueError(f"segment {self._segment.index}: received token {filled + tokens} of {length}")
        if self._padding is not None and not self._segment.index:
            return self._attend_padded(present, self._padding)
        self._steps.advance_to(filled)
        out = self._storage.attend_step(store, *present[1:4], length, self._steps.filled)
        store.filled += tokens
        self.ledger.record_transient(self._storage.max_read_bytes)
        if not self.method.static and tokens < length:
            queries = store.add_queries(q, tokens, length, self._steps.filled)
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
            present: the layer's inputs, with queries for all tokens of the segment, set for the tokens so far.
            q: the token's queries [sequences, heads, queries, D].
            out: output of attention to all slots.
        """
        filled, length = present.store.filled, self._segment.length
        keys, values = (x[:, :, :filled] for x in self._storage.view_pending(present.store, length))
        queries = present.q.unflatten(2, (-1, length))[:, :, :, :filled].flatten(2, 3)
        view = self._show(present._replace(q=queries, k=keys, v=values), self._segment._replace(width=filled))
        sparse = attend_sparsely(self.method, q, view, self.spec.logit_scale)
        if sparse is None:
            return out
        self._record_selection(present.layer, sparse, filled - 1)
        self.ledger.record_transient(sparse.copied)
        return sparse.out

    def _record_selection(self, layer: int, sparse: SparseAttention, filled: int = 0) -> None:
        pending = filled * self.spec.heads
        self.ledger.record_selection(self._segment, layer, sparse.cached, pending, self._slot_bytes)

    def _save(self) -> Callable[[], None]:
        """Return a function that restores the host's bookkeeping of this moment after a device replayed a segment."""
        assert self._plain is not None
        stores, restore_arena = [replace(store) for store in self._stores], self._plain.arena.save()
        ledger = self.ledger.save()

        def restore() -> None:
            self._stores, self.ledger = [replace(store) for store in stores], copy(ledger)
            restore_arena()

        return restore

    def open_steps(self) -> Repeat | None:
        """Return the function that runs the one-token steps of a causal segment, after `begin`, by one recording.

        The recording serves all segments and generations of a batch size. None if the steps must run one by one:
        without a `record`, for the first segment, for low-bit storage, for methods that select what a step attends to,
        and while storage does not fit in the ring.
        """
        self._steps.recorded = self._placed and self.repetitions is not None
        return self._repeat_step if self._steps.recorded else None

    def _repeat_step(self, key: Hashable, step: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Run a step as `Repetitions.run`; after the segment's last one, let the method prune all layers."""
        assert self.repetitions is not None
        self._record_step(self._steps.count)
        out = self.repetitions.run((self._batch, self._rows, key), step, *inputs)
        self._steps.count += 1
        if self._steps.count == self._segment.length:
            self._finish_recorded()
        return out

    def _attend_recorded(self, present: LayerInputs) -> Tensor:
        """Attend with a recorded segment's next token; the device counts tokens."""
        filled = self._steps.filled
        out = self._storage.attend_step(present.store, *present[1:4], self._segment.length, filled)
        if not self.method.static:
            self._steps.store_queries(present.layer, present.q.unflatten(2, (-1, 1)))
        if present.layer == self.spec.layers - 1:
            filled.add_(1)
        return out

    def _finish_recorded(self) -> None:
        """Let the method prune all layers after the last recorded step of a segment."""
        for layer, store in enumerate(self._stores):
            if not self.method.static:
                store.queries = self._steps.read_queries(self._sequences, layer)
        for layer, store in enumerate(self._stores):
            k, v = self._storage.view_pending(store, self._segment.length)
            q = k if store.queries is None else store.queries.flatten(2, 3)
            self._finish(self._join(layer, q, k, v))

    def _attend_padded(self, present: LayerInputs, padding: Padding) -> Tensor:
        """Attend with all tokens of prompts of unequal length in one pass."""
        self._check_length(present)
        out = attend_padded(present.q, present.k, present.v, padding, self.spec.logit_scale)
        self._storage.fill(present.store, present.k, present.v)
        self._finish(present)
        return out

    def _check_length(self, present: LayerInputs) -> None:
        tokens, length = present.k.shape[2], self._segment.length
        if tokens != length:
            what = "padded prompts need one pass" if self._padding else f"segment {self._segment.index}"
            raise ValueError(f"{what}: got {tokens} of {length} tokens")
