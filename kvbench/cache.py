"""The KV cache: attention over what a method kept, exact-size storage, a strict budget and three ledgers."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.attention_mass import attention_mass
from kvbench.kernels.compact import Layout, Tables, empty_layout, plan, rebuild, slots_seen
from kvbench.kernels.ragged_attention import attention_with_lse, dense, ragged_attention
from kvbench.methods.base import Method
from kvbench.segments import ModelSpec, Segment


class BudgetExceeded(RuntimeError):
    """A method kept more than its budget; the message names method, segment, layer and tokens."""


@dataclass
class Ledger:
    """Peaks over every generation since the cache was made.

    Attributes:
        tokens_after: tokens one sequence holds after layer l of segment k, [K][L], the most of any sequence; the last
            row is what is held while the last segment runs.
        peak_bytes: storage between layers, whole batch.
        rebuild_bytes: storage at the worst instant of a rebuild, whole batch.
        transient_bytes: keys and values of the segment in flight, whole batch.
    """

    tokens_after: list[list[int]]
    peak_bytes: int = 0
    rebuild_bytes: int = 0
    transient_bytes: int = 0

    @property
    def peak_tokens(self) -> int:
        """Most tokens one sequence ever held between layers."""
        return max(max(row) for row in self.tokens_after)


@dataclass
class _Layer:
    """One layer's storage: keys and values [batch, slots, D] and where the rows lie."""

    layout: Layout
    keys: Tensor
    values: Tensor

    @property
    def bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


class _Rebuild(NamedTuple):
    layout: Layout
    tables: Tables | None  # None: everything is appended in place


@dataclass
class CacheView:
    """What a method sees of one layer right after a segment (see `kvbench.methods.base.View`)."""

    layer: int
    at: Segment
    sequences: int
    heads: int
    position: Tensor
    segment: Tensor
    _inputs: tuple[Tensor, Tensor, "_Layer", float] | None = field(default=None, repr=False)

    def mass(self) -> Tensor:
        """float32 [rows, slots]: attention each slot receives, mean over the current queries.

        Raises:
            ValueError: the method is static, so it may not look at data.
        """
        if self._inputs is None:
            raise ValueError("a static method cannot ask for attention: set `static = False`")
        q, k, store, scale = self._inputs
        longest = store.layout.positions.shape[1]
        return attention_mass(q, k, store.keys, store.layout.groups, longest, scale).flatten(0, 1)

    def segment_mass(self) -> Tensor:
        """float32 [rows, at.index + 1]: `mass` summed over the slots of each source segment."""
        mass = self.mass()
        summed = mass.new_zeros(len(mass), self.at.index + 1)
        return summed.scatter_add_(1, self.segment.clamp(min=0), mass)


class KVCache:
    """Keys and values of one batch of generations, kept as a method decides.

    Args:
        spec: the model's shapes.
        method: prepared for that model and its budget.
        dtype: of the stored keys and values.
        device: where they live.
        strict: raise when the budget is exceeded; otherwise only record the peak.
    """

    def __init__(
        self,
        spec: ModelSpec,
        method: Method,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        strict: bool = True,
    ) -> None:
        self.spec, self.method, self.strict = spec, method, strict
        self._dtype, self._device = dtype, torch.device(device)
        self._plans: dict[tuple[int, int], _Rebuild] = {}
        self._starts = torch.tensor([segment.start for segment in spec.segments], device=self._device)
        self.ledger = Ledger([[0] * spec.layers for _ in spec.segments])
        self._stores: list[_Layer] = []
        self._held: list[
            Tensor | int
        ] = []  # of every layer: tokens per sequence, one number if all hold as many

    def reset(self, sequences: int) -> None:
        """Starts a generation of `sequences` sequences; whatever was held is dropped."""
        spec = self.spec
        self._sequences = sequences
        self._batch = sequences if self.method.static else 1
        self._rows = spec.heads * sequences // self._batch
        nothing = torch.empty(self._batch, 0, spec.head_dim, dtype=self._dtype, device=self._device)
        layout = empty_layout(self._rows, self._device)
        self._stores = [_Layer(layout, nothing, nothing) for _ in range(spec.layers)]
        self._held = [0] * spec.layers

    def begin(self, segment: Segment) -> None:
        """Announces the segment whose tokens every layer will see next."""
        self._segment = segment

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention over the layer's kept past and the whole current segment; then the method prunes the layer.

        Args:
            layer: index of the layer.
            q: [sequences, query heads, tokens, D]; query heads may be a multiple of the KV heads.
            k: [sequences, heads, tokens, D].
            v: likewise.

        Returns:
            [sequences, query heads, tokens, D] in q's dtype.

        Raises:
            BudgetExceeded: the cache holds more than its budget after this layer.
        """
        store, segment = self._stores[layer], self._segment
        folded = q.reshape(self._batch, self._rows, -1, q.shape[-1])
        k, v = (x.reshape(self._batch, self._rows, -1, x.shape[-1]) for x in (k, v))
        self.ledger.transient_bytes = max(self.ledger.transient_bytes, k.nbytes + v.nbytes)
        if segment.last:
            out = self._attention(folded, k, v, store)
            if self.method.observes_last:
                self.method.keep(self._view(layer, folded, k))
            self._account(layer)
            nothing = store.keys.new_empty(self._batch, 0, store.keys.shape[2])
            self._stores[layer] = _Layer(empty_layout(self._rows, self._device), nothing, nothing)
            return out.view(q.shape)
        change = self._rebuild(layer, folded, k)
        if change.tables is None and self._dtype == q.dtype:
            # Nothing leaves: past and present lie together in the new storage, so one attention reads both.
            store = self._store(layer, k, v, change)
            (group,) = store.layout.groups
            keys, values = dense(store.keys, group), dense(store.values, group)
            out, _ = attention_with_lse(folded, keys, values, self.spec.logit_scale)
        else:
            out = self._attention(folded, k, v, store)
            self._store(layer, k, v, change)
        self._account(layer)
        return out.view(q.shape)

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, store: _Layer) -> Tensor:
        return ragged_attention(q, k, v, store.keys, store.values, store.layout.groups, self.spec.logit_scale)

    def _store(self, layer: int, k: Tensor, v: Tensor, change: _Rebuild) -> _Layer:
        store = self._stores[layer]
        # One after the other: the old keys are gone before the new values are made.
        keys = self._moved(store.keys, k, change)
        store.keys = keys
        values = self._moved(store.values, v, change)
        self._stores[layer] = _Layer(change.layout, keys, values)
        return self._stores[layer]

    def _moved(self, storage: Tensor, current: Tensor, change: _Rebuild) -> Tensor:
        if change.tables is None:
            past = storage.unflatten(1, (self._rows, -1)) if storage.shape[1] else current[:, :, :0]
            moved = torch.cat((past.to(self._dtype), current.to(self._dtype)), 2).flatten(1, 2)
        else:
            moved = rebuild(storage, current, change.tables, change.layout.total)
        held = sum(store.bytes for store in self._stores) + moved.nbytes
        self.ledger.rebuild_bytes = max(self.ledger.rebuild_bytes, held)
        return moved

    def _rebuild(self, layer: int, q: Tensor, k: Tensor) -> _Rebuild:
        at = self._segment
        known = self._plans.get((layer, at.index))
        if known is not None:
            return known
        layout = self._stores[layer].layout
        keep = self.method.keep(self._view(layer, q, k))
        uniform = not layout.groups or layout.groups[0].rows is None
        after, tables = plan(layout, keep, at.start, at.length)
        everything = after.total == layout.total + self._rows * at.length
        change = _Rebuild(after, None if uniform and everything else tables)
        if self.method.static:
            self._plans[layer, at.index] = change
        return change

    def _view(self, layer: int, q: Tensor, k: Tensor) -> CacheView:
        store, at = self._stores[layer], self._segment
        position = slots_seen(store.layout, at.start, at.length)
        segment = torch.bucketize(position, self._starts, right=True) - 1
        sequences = 1 if self.method.static else self._sequences
        inputs = None if self.method.static else (q, k, store, self.spec.logit_scale)
        return CacheView(layer, at, sequences, self.spec.heads, position, segment, inputs)

    def _account(self, layer: int) -> None:
        store, at = self._stores[layer], self._segment
        if self.method.static:
            self._held[layer] = store.layout.total
        else:
            lengths = (store.layout.positions >= 0).sum(1)
            self._held[layer] = lengths.view(-1, self.spec.heads).sum(1).cpu()
        tokens = int(torch.as_tensor(sum(self._held)).max())
        row = self.ledger.tokens_after[at.index]
        row[layer] = max(row[layer], tokens)
        held = sum(other.bytes for other in self._stores)
        self.ledger.peak_bytes = max(self.ledger.peak_bytes, held)
        if self.strict and tokens > self.method.budget.capacity:
            raise BudgetExceeded(
                f"{type(self.method).__name__}: {tokens} tokens held after layer {layer} of segment {at.index}, "
                f"the budget is {float(self.method.budget.capacity):g}; lower what the method keeps or set strict=false"
            )
