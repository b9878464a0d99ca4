"""KV cache: attention over the tokens that a method kept, exact-size storage, a strict budget and a ledger."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor

from kvbench.core.graphs import Record, Repetitions
from kvbench.core.segments import ModelSpec, Segment
from kvbench.engine.bias import narrow, widen, widen_queries
from kvbench.engine.coding.formats import Books, Packing
from kvbench.engine.ledger import Account, Ledger
from kvbench.engine.packed.storage import PackedStorage
from kvbench.engine.padding import Padding, attend_padded, follow_schedule, read_padding
from kvbench.engine.plain import PlainStorage
from kvbench.engine.retention import Held
from kvbench.engine.schedule import Change, Schedule, ask_method, build_schedule, show_layer
from kvbench.engine.sparse_attention import attend_selected
from kvbench.engine.storage import CacheBackend
from kvbench.engine.view import CacheView, LayerInputs, LayerStore, note_queries
from kvbench.kernels.layout import Layout, fold_rows, view_group
from kvbench.kernels.ragged_attention import dense_attention
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.capabilities import (
    ComparesKeys,
    ObservesLast,
    count_lse_queries,
    decides_jointly,
    is_biased,
    is_stateful,
    reads_sparsely,
)


class KVCache:
    """Keys and values of one batch of generations after the other, kept as a method decides.

    Attributes:
        prompts: numbers of the prompts of the next generations, for methods that draw at random; 0, 1, ... unless set.
        record: records a segment's steps for the model that runs them; None: each runs by itself.
        repetitions: of segments whose tokens come at once, under a static method, if there is a `record`; else None.
        projection: returns the model's output projection of a layer, [width, query heads x D], for methods that ask
            for it; None if the model does not tell it.

    Args:
        spec: the model's shapes.
        method: prepared for that model and its budget.
        dtype: of the stored keys and values; of those in few bits, what attention reads them in.
        device: where they live.
        record: see above.
        projection: see above.
        packing: how keys and values are stored in few bits; None: as numbers of `dtype`.
        rotation: RoPE factors, complex64 [positions, D/2]; None without RoPE or if the model does not expose them.
        books: static codebooks, where storage or an observer wants them.
    """

    def __init__(
        self,
        spec: ModelSpec,
        method: Method,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        record: Record | None = None,
        projection: Callable[[int], Tensor | None] | None = None,
        packing: Packing | None = None,
        rotation: Tensor | None = None,
        books: Books | None = None,
    ) -> None:
        self.spec, self.method, self.record, self.projection = spec, method, record, projection
        self.prompts: Sequence[int] | None = None
        self._biased = is_biased(method)
        self._device = torch.device(device)
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
        # Tokens of the segment that came before the step, as kernels read it, and as the host knows that they do.
        self._filled, self._told = torch.zeros(1, dtype=torch.int64, device=self._device), 0
        self.repetitions: Repetitions | None = None
        at_once = not any(segment.causal for segment in spec.segments)
        if record is not None and self._plain is not None and method.static and at_once:
            self.repetitions = Repetitions(record, self._save)
        self.reset(0)

    def reset(self, sequences: int, padding: Sequence[int] | None = None) -> None:
        """Start a generation of `sequences` sequences and its ledger; whatever was held is dropped.

        Args:
            sequences: in the batch.
            padding: tokens in front of each sequence's prompt that do not exist; the prompt then comes in one step.
                Nothing attends to them and nothing of them is stored. None where all prompts are equally long.

        Raises:
            ValueError: not one number a sequence, or no token of a prompt would be left.
        """
        spec = self.spec
        self._padding = read_padding(spec, sequences, padding, self._device)
        # Rows that keep the same slots in all sequences share a layout.
        shared = self.method.static and self._padding is None
        self._sequences = sequences
        self._batch, self._rows = (sequences, spec.heads) if shared else (1, spec.heads * sequences)
        watched = count_lse_queries(self.method) > 0
        self._account = Account(spec, self._rows // spec.heads, watched=watched)
        if self._padding is not None:
            self.ledger.padding = self._padding.min_tokens
        self._stores: list[LayerStore] = []
        self._waiting: list[LayerInputs] = []  # layers of a full segment, until a joint decision
        self._begun: list[Layout] = []  # layouts as the last segment began, which leaves none behind
        if sequences:
            if self.method.static and not self._schedule:
                self._schedule = build_schedule(
                    spec, self.method, self._device, self._storage.find_free_slots
                )
            arena = None if self._plain is None else self._plain.arena
            self._storage.prepare(sequences, self._batch, self._rows, self._schedule)
            if self.repetitions is not None and self._plain is not None and self._plain.arena is not arena:
                self.repetitions.clear()
            self._stores = [
                self._storage.open(layer, self._storage.find_free_slots(0)) for layer in range(spec.layers)
            ]

    def release(self) -> None:
        """Give back all storage of keys and values, once no token is left to attend to them; the ledger stays.

        Where steps are recorded storage stays too: they will be repeated on what lies there.
        """
        if self.record is not None:
            return
        self._begun = self._begun or [store.layout for store in self._stores]
        self._stores = []
        self._storage.release()

    def forget(self) -> None:
        """Drop all that is held or recorded, so that memory which ran out is there again."""
        self.reset(0)
        self._storage.release()
        if self.repetitions is not None:
            self.repetitions.clear()
        if self.record is not None:
            self.record.clear()

    def begin(self, segment: Segment) -> None:
        """Announce the segment whose tokens every layer will see next: at once, or in steps if it is causal."""
        self._segment = segment
        self._begun = [store.layout for store in self._stores] if segment.last else []
        if segment.causal:
            self._filled.zero_()
            self._told = 0
            each = sum(store.slot_bytes for store in self._stores)
            self._account.in_flight = segment.length * self._rows * each
            self._account.note_transient(self._storage.max_read_bytes)

    @property
    def segment(self) -> Segment:
        """The segment that began last."""
        return self._segment

    @property
    def ledger(self) -> Ledger:
        """Peaks of the generation that runs, or of the last one."""
        return self._account.ledger

    @property
    def held(self) -> Held:
        """State of the cache at the beginning of the last segment."""
        layouts = self._begun or [store.layout for store in self._stores]
        return Held(self._segment, layouts, self._padding)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, raw_queries: Callable[[], Tensor] | None = None
    ) -> Tensor:
        """Attend over the layer's kept past and the current segment; once that is full, let the method prune the layer.

        Args:
            layer: index of the layer.
            q: [sequences, query heads, tokens, D]; query heads may be a multiple of the KV heads.
            k: keys [sequences, heads, tokens, D].
            v: values, shaped like k.
            raw_queries: computes the queries as projected, shaped like q; called only if the method asks for them.

        Returns:
            [sequences, query heads, tokens, D] in q's dtype.

        Raises:
            BudgetExceeded: the cache of a strict method holds more than its budget after this layer.
            ValueError: tokens that the segment does not have, or only some of one whose tokens come at once.
        """
        if self._biased:
            q, k, v, raw_queries = widen_queries(q, self.spec.logit_scale), widen(k), widen(v), None
        present = LayerInputs(
            layer,
            self._fold(q),
            self._fold(k),
            self._fold(v),
            self._stores[layer],
            self.spec.logit_scale,
            causal=self._segment.causal,
            raw_queries=raw_queries,
            biased=self._biased,
            projection=self.projection,
            rotation=self._rotation,
            books=self._books,
        )
        out = self._attend_step(present) if self._segment.causal else self._attend_at_once(present)
        out = out if out.shape == q.shape else out.reshape(q.shape)
        return narrow(out) if self._biased else out

    def _fold(self, x: Tensor) -> Tensor:
        """Turn [sequences, heads, tokens, D] into rows [batch, rows, queries, D]."""
        # There kernels find the rows by themselves.
        if x.is_cuda and self._plain is not None and not self._segment.causal:
            return fold_rows(x, self._sequences, self.spec.heads)
        return fold_rows(x, self._batch, self._rows)

    def _attend_at_once(self, present: LayerInputs) -> Tensor:
        """Attend with a whole segment whose tokens see each other."""
        if present.k.shape[2] != self._segment.length:
            raise ValueError(
                f"segment {self._segment.index}: {present.k.shape[2]} tokens came of {self._segment.length}"
            )
        self._account.in_flight = present.k.nbytes + present.v.nbytes
        # On a GPU attention gives methods that look at data the log-sum-exp.
        watching = present.q.is_cuda and not self.method.static
        if self._segment.last or watching or reads_sparsely(self.method):
            out, lse = self._attend_slots(present)
            self._finish(present._replace(lse=lse))
            return out
        change = self._find_change(present)
        if not self._storage.can_append(change, present.q.dtype):
            out, _ = self._attend_slots(present)
            self._store(present, change)
            return out
        # Nothing leaves: past and present lie together in the new storage, where one attention reads both faster.
        store = self._store(present, change)
        (group,) = store.layout.groups
        keys, values = view_group(store.keys, group), view_group(store.values, group)
        return dense_attention(present.q, keys, values, self.spec.logit_scale)[0]

    def _attend_slots(self, present: LayerInputs) -> tuple[Tensor, Tensor | None]:
        """Attend to past and present, or to the slots of both that the method selects."""
        if reads_sparsely(self.method):
            view = self._show(present)
            chosen = self.method.select_attended(view)
            if chosen is not None:
                out, copied = attend_selected(present.q, view, chosen, self.spec.logit_scale)
                self._account.in_flight += copied
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
        if filled != self._told:  # once a step; an addition, which is right whenever it is done again
            self._filled.add_(filled - self._told)
            self._told = filled
        out = self._storage.attend_step(store, *present[1:4], length, self._filled)
        store.filled += tokens
        self._account.note_transient(self._storage.max_read_bytes)
        if not self.method.static and tokens < length:
            asked = note_queries(store, present.q, tokens, length, self._filled)
            present = present._replace(q=asked, raw_queries=None)
        if tokens == 1 and reads_sparsely(self.method):
            out = self._attend_step_sparsely(present, q, out)
        if store.filled == length:
            k, v = self._storage.view_flight(store, length)
            self._finish(present._replace(k=k, v=v))
        return out

    def _attend_step_sparsely(self, present: LayerInputs, q: Tensor, out: Tensor) -> Tensor:
        """Attend with a step's token to the slots that the method selects, in place of all slots.

        Args:
            present: the layer, with the queries of the whole segment, of which those so far exist.
            q: the token's queries [batch, rows, queries, D].
            out: what attention to all slots returned.
        """
        filled = present.store.filled
        so_far = self._segment._replace(width=filled)
        keys, values = (
            x[:, :, :filled] for x in self._storage.view_flight(present.store, self._segment.length)
        )
        asked = present.q.unflatten(2, (-1, self._segment.length))[:, :, :, :filled].flatten(2, 3)
        view = self._show(present._replace(q=asked, k=keys, v=values), so_far)
        assert reads_sparsely(self.method)
        chosen = self.method.select_attended(view)
        if chosen is None:
            return out
        found, copied = attend_selected(q, view, chosen, self.spec.logit_scale)
        self._account.note_transient(copied)
        return found

    def _save(self) -> Callable[[], None]:
        """Note the host's bookkeeping, and return what brings it back after a device has repeated a segment alone."""
        assert self._plain is not None
        stores, arena = [replace(store) for store in self._stores], self._plain.arena.save()
        account = deepcopy(self._account)

        def restore() -> None:
            self._stores, self._account = [replace(store) for store in stores], account
            arena()

        return restore

    def advance(self) -> None:
        """Count a token of the segment whose step was recorded and repeated, so that `attend` was not called."""
        for store in self._stores:
            store.filled += 1
        self._told += 1

    def _attend_padded(self, present: LayerInputs, padding: Padding) -> Tensor:
        """Attend with prompts of unequal length, all of whose tokens come at once."""
        store, length = present.store, self._segment.length
        if present.k.shape[2] != length:
            raise ValueError(
                f"padded prompts must come at once: {present.k.shape[2]} tokens came of {length}"
            )
        out = attend_padded(present.q, present.k, present.v, padding, self.spec.logit_scale)
        self._storage.fill(store, present.k, present.v)
        self._finish(present)
        return out

    def _finish(self, present: LayerInputs) -> None:
        """Keep of a layer what the method says; of the last segment nothing."""
        if not self._segment.last:
            if decides_jointly(self.method):
                self._wait(present)
            else:
                self._store(present, self._find_change(present))
            return
        if isinstance(self.method, ObservesLast) and self.method.observes_last:
            self.method.keep(self._show(present))
        self._enter(present.layer)
        self._account.note_change(present.store.bytes, 0)
        self._storage.close(present.store)
        self._stores[present.layer] = self._storage.open(present.layer)

    def _wait(self, present: LayerInputs) -> None:
        """Let a layer wait for the last one, then decide about all."""
        self._waiting.append(present)
        if len(self._waiting) < self.spec.layers:
            return
        assert decides_jointly(self.method)
        layers, self._waiting = self._waiting, []
        self.method.compare([self._show(each) for each in layers])
        for each in layers:
            self._store(each, self._find_change(each))

    def _find_change(self, present: LayerInputs) -> Change:
        layout = present.store.layout
        free_slots = self._storage.find_free_slots(self._segment.index + 1)
        if self.method.static:
            change = self._schedule[present.layer, self._segment.index]
            if self._padding is None:
                return change
            return follow_schedule(change, self._segment, layout, self._padding, free_slots)
        return ask_method(self.method, self._show(present), layout, free_slots)

    def _show(self, present: LayerInputs, segment: Segment | None = None) -> CacheView:
        """Show a layer after the current segment, or after the part of it that came so far."""
        store, spec, segment = present.store, self.spec, segment or self._segment
        if self.method.static:
            return show_layer(present.layer, segment, store.layout, spec, self._rows // spec.heads)
        state = store.state
        if state is None and is_stateful(self.method):
            per_slot = self.method.numbers
            state = torch.zeros(self._rows, 0, *[per_slot] * (per_slot > 1), device=self._device)
        numbers = range(self._sequences // spec.branches) if self.prompts is None else self.prompts
        prompts = [*numbers] * spec.branches
        padding = None if self._padding is None else self._padding.rows
        return show_layer(
            present.layer, segment, store.layout, spec, self._sequences, present, state, prompts, padding
        )

    def _store(self, present: LayerInputs, change: Change) -> LayerStore:
        """Change a layer's storage and account for it."""
        layer, before = present.layer, present.store.bytes
        after = self._storage.change(layer, present.store, (present.k, present.v), self._segment, change)
        rebuild = self._storage.count_rebuild(before, after.bytes)
        self._account.note_change(before, after.bytes, rebuild)
        self._account.note_drift(self._segment.index, change.drift)
        if isinstance(self.method, ComparesKeys) and self.method.compares(layer, self._segment):
            after.before = present.k.clone()  # a view would keep the whole projection it lies in
        self._stores[layer] = after
        self._enter(layer)
        return after

    def _enter(self, layer: int) -> None:
        self._account.note_transient(self._storage.max_read_bytes)
        self._account.enter(self._segment.index, layer, self._stores, self.spec, self.method)
