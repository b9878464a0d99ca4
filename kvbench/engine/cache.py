"""The KV cache: attention over what a method kept, exact-size storage, a strict budget, a ledger."""

from collections.abc import Callable, Sequence
from fractions import Fraction
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.core.config import UserError
from kvbench.core.graphs import Record
from kvbench.core.segments import ModelSpec, Segment
from kvbench.engine.arena import Arena
from kvbench.engine.bias import narrow, widen, widen_queries
from kvbench.engine.changes import Change, Schedule, ask_method, room_behind, show_layer, work_out_schedule
from kvbench.engine.ledger import Account, open_ledger
from kvbench.engine.lengths import foresee_lengths, foresee_ring
from kvbench.engine.memory import BIAS_CHANNELS
from kvbench.engine.padding import Padding, attend_padded, follow_schedule, read_padding
from kvbench.engine.retention import Held
from kvbench.engine.view import CacheView, Inputs, Store
from kvbench.kernels.compact import move_slots, rebuild
from kvbench.kernels.layout import Layout, empty_layout, view_group, view_room
from kvbench.kernels.ragged_attention import dense_attention, ragged_attention
from kvbench.kernels.step_attention import open_rows, step_attention
from kvbench.methods.base import Method

REBUILD_BOUND = Fraction(11, 10)
"""Storage at the worst instant of a rebuild over B, for methods whose lengths are not known beforehand."""


class BudgetExceeded(UserError, RuntimeError):
    """A method kept more than its budget; the message names method, segment, layer, and tokens or bytes."""


class Present(NamedTuple):
    """What one layer brings to the current segment, in rows.

    Attributes:
        layer: index of the layer.
        q: [batch, rows, queries, D]; the query heads of one KV head lie behind each other.
        k: [batch, rows, tokens, D].
        v: values, shaped like k.
        plain: computes the queries as projected, if the model tells them.
    """

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    plain: Callable[[], Tensor] | None


class KVCache:
    """Keys and values of one batch of generations after the other, kept as a method decides.

    Attributes:
        ledger: peaks of the generation that runs, or of the last one.
        prompts: numbers of the prompts of the next generations, for methods that draw at random; 0, 1, ... unless set.
        record: records a segment's steps for the model that runs them; None: each runs by itself.
        projection: returns the model's output projection of a layer, [width, query heads x D], for methods that ask
            for it; None if the model does not tell it.

    Args:
        spec: the model's shapes.
        method: prepared for that model and its budget.
        dtype: of the stored keys and values.
        device: where they live.
        record: see above.
        projection: see above.
    """

    def __init__(
        self,
        spec: ModelSpec,
        method: Method,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        record: Record | None = None,
        projection: Callable[[int], Tensor] | None = None,
    ) -> None:
        self.spec, self.method, self.record, self.projection = spec, method, record, projection
        self.prompts: Sequence[int] | None = None
        self._dtype, self._device = dtype, torch.device(device)
        self._channels = spec.head_dim + (BIAS_CHANNELS if method.biased else 0)
        self._schedule: Schedule = {}
        self._arena = Arena(0, dtype, self._device)
        # Tokens of the segment that came before the step, as kernels read it, and as the host knows that they do.
        self._filled, self._told = torch.zeros(1, dtype=torch.int64, device=self._device), 0
        self._ring: int | None = None  # slots of one sequence that the arena must hold
        self._layouts: dict[
            tuple[int, int], Layout
        ] = {}  # of empty rows, by their number and the room behind them
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
        self.ledger = open_ledger(spec)
        if self.method.watched:
            self.ledger.lse = [[] for _ in spec.segments]
        if self._padding is not None:
            self.ledger.padding = self._padding.least
        self._sequences = sequences
        self._batch, self._rows = (sequences, spec.heads) if shared else (1, spec.heads * sequences)
        self._stored = 0  # bytes of all stores
        self._account = Account(self.ledger, spec.layers, self._rows // spec.heads)
        self._stores: list[Store] = []
        self._begun: list[Layout] = []  # layouts as the last segment began, which leaves none behind
        if sequences:
            if self.method.static and not self._schedule:
                self._schedule = work_out_schedule(spec, self.method, self._device)
            self._prepare_arena()
            self._stores = [self._make_store(room_behind(spec, 0)) for _ in range(spec.layers)]

    def begin(self, segment: Segment) -> None:
        """Announce the segment whose tokens every layer will see next: at once, or in steps if it is causal."""
        self._segment = segment
        self._begun = [store.layout for store in self._stores] if segment.last else []
        if segment.causal:
            self._filled.zero_()
            self._told = 0
            in_flight = segment.length * self._rows * sum(store.slot_bytes for store in self._stores)
            self.ledger.transient_bytes = max(self.ledger.transient_bytes, in_flight)

    @property
    def held(self) -> Held:
        """What was held when the segment began that ran last."""
        layouts = self._begun or [store.layout for store in self._stores]
        return Held(self._segment, layouts, self._padding)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, plain: Callable[[], Tensor] | None = None
    ) -> Tensor:
        """Attend over the layer's kept past and the current segment; once that is full, let the method prune the layer.

        Args:
            layer: index of the layer.
            q: [sequences, query heads, tokens, D]; query heads may be a multiple of the KV heads.
            k: keys [sequences, heads, tokens, D].
            v: values, shaped like k.
            plain: computes the queries as projected, shaped like q; called only if the method asks for them.

        Returns:
            [sequences, query heads, tokens, D] in q's dtype.

        Raises:
            BudgetExceeded: the cache of a strict method holds more than its budget after this layer.
            ValueError: tokens that the segment does not have, or only some of one whose tokens come at once.
        """
        if self.method.biased:
            q, k, v, plain = widen_queries(q, self.spec.logit_scale), widen(k), widen(v), None
        present = Present(layer, self._fold(q), self._fold(k), self._fold(v), plain)
        out = self._attend_step(present) if self._segment.causal else self._attend_at_once(present)
        out = out if out.shape == q.shape else out.reshape(q.shape)
        return narrow(out) if self.method.biased else out

    def _fold(self, x: Tensor) -> Tensor:
        """Turn [sequences, heads, tokens, D] into rows [batch, rows, queries, D]."""
        rows = (self._batch, self._rows)
        return x if x.shape[:2] == rows else x.reshape(*rows, -1, x.shape[-1])

    def _attend_at_once(self, present: Present) -> Tensor:
        """Attend with a whole segment whose tokens see each other."""
        if present.k.shape[2] != self._segment.length:
            raise ValueError(
                f"segment {self._segment.index}: {present.k.shape[2]} tokens came of {self._segment.length}"
            )
        in_flight = present.k.nbytes + present.v.nbytes
        self.ledger.transient_bytes = max(self.ledger.transient_bytes, in_flight)
        if present.q.is_cuda or self._segment.last:
            out, lse = self._attend_parts(present)
            self._finish(present, lse)
            return out
        change = self._find_change(present)
        if not change.appends or self._dtype != present.q.dtype:
            out, _ = self._attend_parts(present)
            self._store(present, change)
            return out
        # Nothing leaves: past and present lie together in the new storage, where one attention reads both faster.
        store = self._store(present, change)
        (group,) = store.layout.groups
        keys, values = view_group(store.keys, group), view_group(store.values, group)
        return dense_attention(present.q, keys, values, self.spec.logit_scale)[0]

    def _attend_parts(self, present: Present) -> tuple[Tensor, Tensor | None]:
        store = self._stores[present.layer]
        past = (store.keys, store.values, store.layout)
        return ragged_attention(present.q, present.k, present.v, *past, self.spec.logit_scale)

    def _attend_step(self, present: Present) -> Tensor:
        """Attend with the next tokens of a causal segment, and finish the segment with its last one."""
        store, length = self._stores[present.layer], self._segment.length
        filled, tokens = store.filled, present.k.shape[2]
        if filled + tokens > length:
            raise ValueError(
                f"segment {self._segment.index}: token {filled + tokens} came, it has {length} tokens"
            )
        if self._padding is not None and not self._segment.index:
            return self._attend_padded(present, self._padding)
        if store.rows is None:
            store.rows = open_rows(store.keys, store.values, store.layout, filled=self._filled)
        if filled != self._told:  # once a step; an addition, which is right whenever it is done again
            self._filled.add_(filled - self._told)
            self._told = filled
        out = step_attention(present.q, present.k, present.v, store.rows, filled, self.spec.logit_scale)
        store.filled += tokens
        if not self.method.static and tokens < length:
            present = present._replace(q=self._note_queries(store, present.q, filled), plain=None)
        if store.filled == length:
            k, v = (view_room(x, store.layout, 0, length) for x in (store.keys, store.values))
            self._finish(present._replace(k=k, v=v))
        return out

    def advance(self) -> None:
        """Count a token of the segment whose step was recorded and repeated, so that `attend` was not called."""
        for store in self._stores:
            store.filled += 1
        self._told += 1

    def _attend_padded(self, present: Present, padding: Padding) -> Tensor:
        """Attend with prompts of unequal length, all of whose tokens come at once."""
        store, length = self._stores[present.layer], self._segment.length
        if present.k.shape[2] != length:
            raise ValueError(f"padded prompts come at once: {present.k.shape[2]} tokens came of {length}")
        out = attend_padded(present.q, present.k, present.v, padding, self.spec.logit_scale)
        for storage, new in ((store.keys, present.k), (store.values, present.v)):
            view_room(storage, store.layout, 0, length).copy_(new)
        self._finish(present)
        return out

    def _note_queries(self, store: Store, q: Tensor, filled: int) -> Tensor:
        """Note the queries of a step for the method; return those of the whole segment, as `Present` has them."""
        folds = q.shape[2] // (store.filled - filled)
        if store.asked is None:
            shape = (*q.shape[:2], folds, self._segment.length, q.shape[3])
            store.asked = q.new_empty(shape)
        each = q.unflatten(2, (folds, -1))
        if each.shape[3] == 1:
            store.asked.index_copy_(3, self._filled, each)
        else:
            store.asked[:, :, :, filled : store.filled] = each
        return store.asked.flatten(2, 3)

    def _finish(self, present: Present, lse: Tensor | None = None) -> None:
        """Keep of a layer what the method says; of the last segment nothing."""
        if not self._segment.last:
            self._store(present, self._find_change(present, lse))
            return
        if self.method.observes_last:
            self.method.keep(self._show(present, lse))
        self._enter(present.layer)
        store = self._stores[present.layer]
        self._stored -= store.bytes
        for ticket in store.tickets:
            self._arena.release(ticket)
        self._stores[present.layer] = self._make_store()

    def _find_change(self, present: Present, lse: Tensor | None = None) -> Change:
        layout = self._stores[present.layer].layout
        room = room_behind(self.spec, self._segment.index + 1)
        if self.method.static:
            change = self._schedule[present.layer, self._segment.index]
            if self._padding is None:
                return change
            return follow_schedule(change, self._segment, layout, self._padding, room)
        return ask_method(self.method, self._show(present, lse), layout, room)

    def _show(self, present: Present, lse: Tensor | None) -> CacheView:
        store, spec, at = self._stores[present.layer], self.spec, self._segment
        if self.method.static:
            return show_layer(present.layer, at, store.layout, spec, self._rows // spec.heads)
        _, q, k, v, plain = present
        projection = None if self.projection is None else self.projection(present.layer)
        inputs = Inputs(
            q, k, v, plain, store, spec.logit_scale, at.causal, lse, self.method.biased, projection
        )
        state = store.state
        if state is None and self.method.stateful:
            state = torch.zeros(self._rows, 0, device=self._device)
        numbers = range(self._sequences // spec.branches) if self.prompts is None else self.prompts
        prompts = [*numbers] * spec.branches
        padding = None if self._padding is None else self._padding.rows
        return show_layer(
            present.layer, at, store.layout, spec, self._sequences, inputs, state, prompts, padding
        )

    def _store(self, present: Present, change: Change) -> Store:
        """Change a layer's storage and account for it."""
        store = self._stores[present.layer]
        self._stored -= store.bytes
        half = [store.bytes // 2, change.layout.total * store.slot_bytes // 2]
        # One after the other: the old keys are gone before the new values are made.
        keys, first = self._move(store.keys, store, present.k, change)
        if change.contents is not None:
            keys.index_copy_(1, change.contents.slots, change.contents.keys[None].to(self._dtype))
        self._note_rebuild(2 * half[0] + half[1])
        self._arena.release(store.tickets[0])
        store.keys = keys
        values, second = self._move(store.values, store, present.v, change)
        if change.contents is not None:
            values.index_copy_(1, change.contents.slots, change.contents.values[None].to(self._dtype))
        self._note_rebuild(half[0] + 2 * half[1])
        self._arena.release(store.tickets[1])
        before = None
        if self.method.compares(present.layer, self._segment):
            before = present.k.clone() if store.layout.room else present.k
        after = Store(change.layout, keys, values, (first, second), change.state, before)
        self._stores[present.layer] = after
        self._stored += after.bytes
        self.ledger.drifts += change.drift.total
        self.ledger.drops += change.drift.rows
        if self.method.watched:
            self.ledger.lse[self._segment.index].append((change.drift.before, change.drift.after))
        self._enter(present.layer)
        return after

    def _move(
        self, storage: Tensor, store: Store, current: Tensor, change: Change
    ) -> tuple[Tensor, int | None]:
        """Copy what stays of a layer's keys or values to new storage."""
        moved, ticket = self._arena.take((self._batch, change.layout.capacity, storage.shape[2]))
        if store.layout.room:
            move_slots(storage, change.source, moved)
        elif change.appends and not storage.is_cuda and not change.layout.room:
            # A GPU copies by a table as fast as without one.
            past = storage.unflatten(1, (self._rows, -1)) if storage.shape[1] else current[:, :, :0]
            parts = (past.to(self._dtype), current.to(self._dtype))
            torch.cat(parts, 2, out=moved.unflatten(1, (self._rows, -1)))
        else:
            rebuild(storage, current, change.source, moved)
        return moved, ticket

    def _note_rebuild(self, layer_bytes: int) -> None:
        self.ledger.rebuild_bytes = max(self.ledger.rebuild_bytes, self._stored + layer_bytes)

    def _make_store(self, room: int = 0) -> Store:
        """Make storage that holds nothing yet, with so much room behind every row."""
        at = (self._rows, room)
        if at not in self._layouts:
            self._layouts[at] = empty_layout(self._rows, self._device, room)
        layout = self._layouts[at]
        shape = (self._batch, layout.capacity, self._channels)
        parts = [self._arena.take(shape) for _ in ("keys", "values")]
        for tensor, _ in parts:
            tensor.zero_()  # room is read before it is full where rows are padded
        (keys, first), (values, second) = parts
        return Store(layout, keys, values, (first, second))

    def _prepare_arena(self) -> None:
        """Clear the arena, and make it larger where this generation may hold more than those before."""
        if self._ring is None:
            self._ring = self._foresee_ring()
        numbers = self._ring * self._sequences * self._channels
        if numbers > self._arena.numbers:
            self._arena = Arena(
                0, self._dtype, self._device
            )  # the old one is gone before the new one is made
            self._arena = Arena(numbers, self._dtype, self._device)
        self._arena.clear()

    def _foresee_ring(self) -> int:
        """Return the slots that one sequence's storage needs; where data decides, what a strict budget lets it have."""
        spec = self.spec
        lengths = foresee_lengths(spec, self.method, self._schedule)
        if lengths is None:
            if not self.method.strict:
                return 0
            arriving = max(room_behind(spec, at.index) for at in spec.segments) * spec.all_heads
            return 2 * (ceil(REBUILD_BOUND * self.method.budget.capacity) + arriving)
        return foresee_ring(spec, lengths)

    def _enter(self, layer: int) -> None:
        """Enter what a layer now holds in the ledger, and make sure that it is within the budget."""
        store, method, heads = self._stores[layer], self.method, self.spec.heads
        counts, segment = store.layout.counts, self._segment.index
        rows = [counts[row : row + heads] for row in range(0, len(counts), heads)]
        held_bytes = [sum(row) * store.token_bytes for row in rows]
        tokens, stored = self._account.enter(segment, layer, rows, held_bytes)
        self.ledger.peak_bytes = max(self.ledger.peak_bytes, self._stored)
        if not method.static:
            state = sum(other.state_bytes for other in self._stores)
            self.ledger.state_bytes = max(self.ledger.state_bytes, state)
        budget = method.budget
        held, most = (tokens, budget.capacity) if budget.bytes is None else (stored, budget.bytes)
        if method.strict and held > most:
            raise BudgetExceeded(
                f"{type(method).__name__}: {held} {budget.unit} held after layer {layer} of segment {segment}, the "
                f"budget is {float(most):.10g}; lower what the method keeps, or let it be `strict = False`"
            )
