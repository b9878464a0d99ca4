"""Ledger of a generation: the tokens and bytes that a cache holds, their peaks, and the check of the budget."""

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from kvbench.core.budget import Budget
from kvbench.core.config import UserError
from kvbench.core.segments import ModelSpec, Segment
from kvbench.engine.reads import Reads, add_reads

if TYPE_CHECKING:  # imports torch, which a reader of results does without
    from torch import Tensor

    from kvbench.engine.layer import LayerStore
    from kvbench.engine.schedule import LogSumExpDrift
    from kvbench.methods.shared.base import Method

N = TypeVar("N", int, float)
Table = list[list[list[int]]]
ROUNDING = 1e-6
"""Tolerance, in tokens, of a mean over rows."""


class BudgetExceeded(UserError, RuntimeError):
    """A method kept more than its budget; the message names method, segment, layer, and tokens or bytes."""


@dataclass(frozen=True)
class Step:
    """Tokens and bytes of one sequence after a segment, or their mean over sequences.

    Attributes:
        tokens: position after the segment: tokens so far, and padding in front of the prompt.
        held: tokens of a row, a mean over layers and KV heads.
        longest: tokens of the longest row of any layer; storage of equally long rows has this many slots in each
            (Hard-KV's HA-Max).
        lse: log-sum-exp of the observed queries over all slots before the drop, in nats, a mean over queries, heads and
            layers; None without observed queries.
        kept_lse: mean log-sum-exp over the kept slots, likewise.
        n: number of sequences in the mean.
    """

    tokens: int
    held: float
    longest: float
    lse: float | None = None
    kept_lse: float | None = None
    n: int = 1


class BudgetUse(NamedTuple):
    """Use of the budget by the sequences of one prompt.

    Attributes:
        last_tokens: maximum tokens that a sequence held while the last segment ran, or at the end of its text.
        last_bytes: maximum bytes of a sequence's keys and values at that time.
        least_share: minimum share of min(B, all tokens so far) that a sequence held after a segment.
    """

    last_tokens: int
    last_bytes: int
    least_share: float


@dataclass
class Ledger:
    """Tokens and bytes of one generation, which a cache records after each layer, and their peaks.

    Attributes:
        held: tokens that each sequence holds after layer l of segment k, [K][L][sequences], with a single value if all
            sequences hold the same; the last row is held while the last segment runs. Rows are 0 after an early end of
            a text.
        longest: tokens of each sequence's longest row of layer l after segment k, shaped like `held`.
        prompts: tokens of each sequence's prompt; empty if all prompts are equally long.
        held_bytes: bytes of the stored keys and values, shaped like `held`.
        peak_bytes: peak of storage between layers, whole batch.
        rebuild_bytes: peak of storage during rebuilds, whole batch.
        transient_bytes: peak of unstored and decoded keys and values, whole batch.
        state_bytes: peak of what the method keeps (a score per slot, the last segment's keys), whole batch.
        lse: log-sum-exp of observed queries in nats before and after the drop of a layer, of each sequence,
            [K][layers] of pairs; empty without observed queries.
        drifts: nats by which drops changed the log-sum-exp of observed queries, summed over layers, segments and rows.
        drops: number of rows that dropped slots, over all layers and segments.
        unprotected: slots of score +inf that each sequence dropped; empty before `read_unprotected`.
        reads: bytes that attention read from the cache.
        pending_bytes: bytes of the segment's keys and values that are not stored yet, of all sequences.
    """

    held: Table
    longest: Table = field(default_factory=list)
    prompts: Sequence[int] = ()
    held_bytes: Table = field(default_factory=list)
    peak_bytes: int = 0
    rebuild_bytes: int = 0
    transient_bytes: int = 0
    state_bytes: int = 0
    lse: list[list[tuple[Sequence[float], Sequence[float]]]] = field(default_factory=list)
    drifts: float = 0.0
    drops: int = 0
    unprotected: Sequence[int] = ()
    reads: Reads = field(default_factory=Reads)
    pending_bytes: int = field(default=0, init=False, repr=False, compare=False)
    _unprotected: "Tensor | None" = field(default=None, init=False, repr=False, compare=False)  # int64 [rows]
    _stored_bytes: int = field(default=0, init=False, repr=False, compare=False)
    _tokens: Sequence[int] = field(default=(), init=False, repr=False, compare=False)  # held by each sequence
    _bytes: Sequence[int] = field(default=(), init=False, repr=False, compare=False)
    _read_bytes: Sequence[int] = field(
        default=(), init=False, repr=False, compare=False
    )  # bytes that attention would read
    _layers: list[tuple[Sequence[int], ...]] = field(
        init=False, repr=False, compare=False
    )  # `_tokens`, `_bytes` and `_read_bytes` of each layer

    @classmethod
    def open(cls, spec: ModelSpec, sequences: int, *, observes_lse: bool) -> "Ledger":
        """Return the ledger of a generation that begins.

        Args:
            spec: the model's shapes.
            sequences: sequences that may hold different numbers of tokens.
            observes_lse: whether the log-sum-exp of queries is recorded.
        """
        held, longest, held_bytes = ([[[0]] * spec.layers for _ in spec.segments] for _ in range(3))
        ledger = cls(held, longest, held_bytes=held_bytes)
        ledger.lse = [[] for _ in spec.segments] if observes_lse else []
        ledger.reads = Reads([[] for _ in spec.segments])
        ledger._tokens = ledger._bytes = ledger._read_bytes = [0] * sequences
        ledger._layers = [(ledger._tokens,) * 3] * spec.layers
        return ledger

    def save(self) -> "Ledger":
        """Return a copy of the host's values; tensors on a device are shared, because recorded work updates them."""
        tensor = self._unprotected
        return deepcopy(self, {id(tensor): tensor})

    def record_transient(self, read_bytes: int) -> None:
        """Record the peak of bytes that are not stored: pending ones plus `read_bytes`."""
        self.transient_bytes = max(self.transient_bytes, self.pending_bytes + read_bytes)

    def record_rebuild(self, before: int, after: int, peak: int = 0) -> None:
        """Record a layer's bytes before and after a rebuild, and the peak during it."""
        self.rebuild_bytes = max(self.rebuild_bytes, self._stored_bytes - before + peak)
        self._stored_bytes += after - before

    def record_drift(self, segment: int, drift: "LogSumExpDrift") -> None:
        """Record how an eviction after a segment changed the log-sum-exp of the observed queries."""
        self.drifts += drift.total
        self.drops += drift.rows
        if self.lse:
            self.lse[segment].append((drift.before, drift.after))

    def record_unprotected(self, slots: "Tensor") -> None:
        """Add the slots of score +inf that rows dropped, int64 [rows]; the device is not read."""
        self._unprotected = slots if self._unprotected is None else self._unprotected + slots

    def read_unprotected(self, heads: int) -> None:
        """Set `unprotected` after a generation, which waits for the device; a sequence has `heads` rows."""
        if self._unprotected is not None:
            self.unprotected = self._unprotected.unflatten(0, (-1, heads)).sum(1).tolist()
            self._unprotected = None

    def record_step(self, segment: Segment, filled: int, slot_bytes: int, spec: ModelSpec) -> None:
        """Record what the attention of a step reads from the cache (`Reads.record`)."""
        self.reads.record(spec, segment, filled, self._read_bytes, slot_bytes)

    def record_selection(
        self, segment: Segment, layer: int, chosen: Sequence[int], pending: int, slot_bytes: int
    ) -> None:
        """Record that a layer's attention reads only selected slots of the cache.

        Args:
            segment: the segment of the step.
            layer: index of the layer.
            chosen: slots in the cache that each row reads.
            pending: tokens of the segment before the step, over the heads of a sequence.
            slot_bytes: bytes of a pending token.
        """
        tokens, _, stored = self._layers[layer]
        heads = len(chosen) // len(tokens)
        for sequence, (held, size) in enumerate(zip(tokens, stored, strict=True)):
            most = held + pending
            left_out = most - sum(chosen[sequence * heads : (sequence + 1) * heads])
            # A slot of low-bit storage counts as the mean of its layer.
            size = (size + pending * slot_bytes) * left_out // max(most, 1)
            self.reads.leave_out(segment, sequence, size)

    def record_layer(
        self, segment: int, layer: int, store: "LayerStore", state_bytes: int, spec: ModelSpec
    ) -> None:
        """Record what a layer holds after a segment.

        Args:
            segment: its index.
            layer: its index.
            store: its storage.
            state_bytes: bytes that the method keeps beside keys and values, in all layers.
            spec: the model's shapes.
        """
        counts, heads = store.layout.counts, spec.heads
        rows = [counts[row : row + heads] for row in range(0, len(counts), heads)]
        tokens, held_bytes = [*map(sum, rows)], store.count_sequence_bytes(heads, spec.branches)
        after = tokens, held_bytes, store.count_read_bytes(heads)
        before, self._layers[layer] = self._layers[layer], after
        totals = self._tokens, self._bytes, self._read_bytes
        self._tokens, self._bytes, self._read_bytes = map(_exchange, totals, before, after)
        self.held[segment][layer], self.held_bytes[segment][layer] = self._tokens, self._bytes
        self.longest[segment][layer] = [*map(max, rows)]
        self.peak_bytes = max(self.peak_bytes, self._stored_bytes)
        self.state_bytes = max(self.state_bytes, state_bytes)

    def check_budget(self, segment: int, layer: int, method: "Method") -> None:
        """Check the budget of a strict method after a layer.

        Raises:
            BudgetExceeded: a sequence holds more than the budget.
        """
        budget = method.budget
        totals, limit = (
            (self._tokens, budget.capacity) if budget.bytes is None else (self._bytes, budget.bytes)
        )
        if method.strict and (total := max(totals, default=0)) > limit:
            raise BudgetExceeded(
                f"method={method.title}: {total} {budget.unit} held after layer {layer} of segment {segment}, the "
                f"budget is {float(limit):.10g}; keep fewer tokens or set strict=False"
            )

    @property
    def lse_drift(self) -> float | None:
        """Change of the observed queries' log-sum-exp by evictions, in nats, a mean over rows and evictions.

        Eviction makes it negative; more attention to the dropped slots means a larger change, and 0 is no change
        (Hard-KV, appendix G). None without observed queries or drops.
        """
        return self.drifts / self.drops if self.drops else None

    @property
    def tokens_after(self) -> list[list[int]]:
        """Maximum number of tokens that a sequence held after each segment and layer, [K][L]."""
        return [[max(sequences, default=0) for sequences in row] for row in self.held]

    @property
    def last_tokens(self) -> int:
        """Maximum tokens that a sequence held while the last segment ran, or last if generation ended earlier."""
        return max(self.held[self._count_segments() - 1][-1], default=0)

    @property
    def last_bytes(self) -> int:
        """Maximum bytes of keys and values that a sequence held at the time of `last_tokens`."""
        return max(self.held_bytes[self._count_segments() - 1][-1], default=0)

    @property
    def peak_tokens(self) -> int:
        """Maximum number of tokens that one sequence held between layers."""
        return max(max(row) for row in self.tokens_after)

    @property
    def sequence_bytes(self) -> int:
        """Maximum bytes of keys and values that one sequence held between layers."""
        return max(max(layer, default=0) for row in self.held_bytes for layer in row)

    def measure_use(
        self, spec: ModelSpec, budget: Budget, sequences: Iterable[int], drawn: int | None = None
    ) -> BudgetUse:
        """Return how much of the budget some sequences of one prompt used.

        Args:
            spec: the whole model's shapes.
            budget: the budget B of the whole model.
            sequences: indices of the sequences.
            drawn: tokens of the prompt's text, after which segments are omitted; None for an image.
        """
        count = len(self._list_ends(spec, drawn))
        ends = [(sequence, k) for sequence in sequences for k in range(count)]
        if not ends:
            return BudgetUse(self.last_tokens, self.last_bytes, 1.0)
        last_tokens, last_bytes = (
            max(_pick(table[count - 1][-1], sequence) for sequence, _ in ends)
            for table in (self.held, self.held_bytes)
        )
        return BudgetUse(
            last_tokens, last_bytes, float(min(self._find_share(spec, budget, *end) for end in ends))
        )

    def _find_share(self, spec: ModelSpec, budget: Budget, sequence: int, segment: int) -> Fraction:
        """Return the share of the possible tokens that a sequence held after a segment.

        Possible tokens are the capacity, or all tokens so far if they are fewer. For a budget in bytes, held bytes are
        converted to tokens by the ratio of capacity to budget. Padding is not a token; if it counts as held, it is
        subtracted from the capacity too, down to one token per head.
        """
        capacity, heads, end = budget.capacity, spec.all_heads, spec.ends[segment]
        if budget.bytes is None:
            held = Fraction(_pick(self.held[segment][-1], sequence))
        else:
            held = _pick(self.held_bytes[segment][-1], sequence) * capacity / budget.bytes
        padding = spec.ends[0] - _pick(self.prompts, sequence) if self.prompts else 0
        if spec.padding_counts:
            return held / max(
                min(capacity, Fraction(heads * end)) - heads * padding, Fraction(heads if padding else 0)
            )
        return held / min(capacity, Fraction(heads * (end - padding)))

    def _list_ends(self, spec: ModelSpec, drawn: int | None) -> list[int]:
        """Return the positions after the segments that are cached, up to the end of a text of `drawn` tokens."""
        ends = spec.ends[: min(self._count_segments(), len(self.held) - 1)]
        return [end for end in ends if drawn is None or end - spec.ends[0] < drawn]

    def trace(self, spec: ModelSpec, sequence: int, drawn: int | None = None) -> list[Step]:
        """Return what one sequence held after each segment that is cached.

        Args:
            spec: the whole model's shapes.
            sequence: index of the sequence.
            drawn: tokens of its text, after which segments are omitted; None for an image.
        """
        steps = []
        for k, end in enumerate(self._list_ends(spec, drawn)):
            held = _pick(self.held[k][-1], sequence) / spec.all_heads
            longest = max(_pick(layer, sequence) for layer in self.longest[k])
            pairs = (
                [[_pick(values, sequence) for values in layer] for layer in self.lse[k]] if self.lse else []
            )
            before, after = (fmean(layer) for layer in zip(*pairs, strict=True)) if pairs else (None, None)
            steps.append(Step(end, held, longest, before, after))
        return steps

    def _count_segments(self) -> int:
        """Return the number of completed segments."""
        return sum(max(row[-1], default=0) > 0 for row in self.held)


def find_utilisation(steps: Sequence[Step]) -> float | None:
    """Return slot utilisation: tokens held over the slots of rows padded to the longest, in (0, 1].

    It is the mean row length divided by the maximum (Hard-KV, Table 3: overall over maximum sparsity), both summed over
    the segments from the first one that dropped a token. None without drops.
    """
    dropped = [
        before.held + now.tokens - before.tokens - now.held > ROUNDING for before, now in pairwise(steps)
    ]
    if True not in dropped:
        return None
    since = steps[1 + dropped.index(True) :]
    return sum(step.held for step in since) / sum(step.longest for step in since)


def _pick(values: Sequence[N], sequence: int) -> N:
    """Return the value of a sequence; a single value is common to all."""
    return values[sequence if len(values) > 1 else 0]


def add_ledgers(ledgers: Sequence[Ledger]) -> Ledger:
    """Return the ledger of a generation whose heads were divided among several caches.

    Tokens are summed at each moment; bytes are the sum of the caches' peaks, since each cache has its own memory.
    """
    counts = ("peak_bytes", "rebuild_bytes", "transient_bytes", "state_bytes", "drifts", "drops")
    return Ledger(
        _join([ledger.held for ledger in ledgers], sum),
        _join([ledger.longest for ledger in ledgers], max),
        ledgers[0].prompts,
        unprotected=[*map(sum, zip(*(ledger.unprotected for ledger in ledgers), strict=True))],
        held_bytes=_join([ledger.held_bytes for ledger in ledgers], sum),
        reads=add_reads([ledger.reads for ledger in ledgers]),
        lse=[
            [_average(layer) for layer in zip(*row, strict=True)]
            for row in zip(*(ledger.lse for ledger in ledgers), strict=True)
        ],
        **{name: sum(getattr(ledger, name) for ledger in ledgers) for name in counts},
    )


def _join(tables: Sequence[Table], combine: Callable[[Sequence[int]], int]) -> Table:
    """Combine the tables [K][L][sequences] of several caches."""
    return [
        [[combine(each) for each in zip(*layer, strict=True)] for layer in zip(*row, strict=True)]
        for row in zip(*tables, strict=True)
    ]


def _average(
    shares: Sequence[tuple[Sequence[float], Sequence[float]]],
) -> tuple[Sequence[float], Sequence[float]]:
    """Average log-sum-exps before and after an eviction over caches with equally many heads."""
    before, after = ([fmean(each) for each in zip(*part, strict=True)] for part in zip(*shares, strict=True))
    return before, after


def _exchange(totals: Sequence[int], old: Sequence[int], new: Sequence[int]) -> list[int]:
    return [total - before + now for total, before, now in zip(totals, old, new, strict=True)]
