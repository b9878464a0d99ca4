"""Ledger of a generation: what the cache holds, checked against the budget, and its peaks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from statistics import fmean
from typing import TypeVar

from kvbench.core.budget import Budget
from kvbench.core.config import UserError
from kvbench.core.segments import ModelSpec
from kvbench.engine.schedule import Drift
from kvbench.engine.view import LayerStore
from kvbench.methods.shared.base import Method

N = TypeVar("N", int, float)
Table = list[list[list[int]]]
TINY = 1e-6
"""Part of a token that rounding makes of a mean over rows; one token is more."""


class BudgetExceeded(UserError, RuntimeError):
    """A method kept more than its budget; the message names method, segment, layer, and tokens or bytes."""


@dataclass(frozen=True)
class Step:
    """Tokens and bytes of one sequence after a segment, or their mean over sequences.

    Attributes:
        tokens: position after the segment: tokens so far, and padding in front of the prompt.
        held: tokens of a row, a mean over layers and KV heads.
        longest: tokens of the longest row of any layer: slots of every row if all are made alike (Hard-KV's HA-Max).
        lse: log-sum-exp of the observed queries over all that was held before the drop, in nats, a mean over queries,
            heads and layers; None where none are watched.
        kept_lse: the same over what stays.
        n: sequences that this is a mean of.
    """

    tokens: int
    held: float
    longest: float
    lse: float | None = None
    kept_lse: float | None = None
    n: int = 1


@dataclass
class Ledger:
    """Peaks of one generation.

    Attributes:
        held: tokens that each sequence holds after layer l of segment k, [K][L][sequences], one number if all hold as
            many; the last row is what is held while the last segment runs. Rows are 0 from where a text ended early.
        longest: tokens of the longest row of layer l after segment k, of each sequence, [K][L][sequences] as `held`.
        padding: tokens that no prompt of the batch has, of as many as the model's prompts may have.
        held_bytes: bytes of the keys and values of the tokens held, as they are stored, shaped like `held`.
        peak_bytes: storage between layers, whole batch.
        rebuild_bytes: storage at the worst instant of a rebuild, whole batch.
        transient_bytes: keys and values of the segment in flight, whole batch.
        state_bytes: what the method keeps beside them (a score per slot, the last segment's keys), whole batch.
        lse: log-sum-exp of observed queries in nats before and after the drop of a layer, of each sequence,
            [K][layers] of pairs; empty where none are watched.
        drifts: nats by which drops changed the log-sum-exp of observed queries, summed over layers, segments and rows.
        drops: how many rows dropped anything, of all layers and segments.
    """

    held: Table
    longest: Table = field(default_factory=list)
    padding: int = 0
    held_bytes: Table = field(default_factory=list)
    peak_bytes: int = 0
    rebuild_bytes: int = 0
    transient_bytes: int = 0
    state_bytes: int = 0
    lse: list[list[tuple[Sequence[float], Sequence[float]]]] = field(default_factory=list)
    drifts: float = 0.0
    drops: int = 0

    @property
    def lse_drift(self) -> float | None:
        """Change of the observed queries' log-sum-exp by evictions, in nats, a mean over rows and evictions.

        Eviction makes it negative, the more so the more attention goes to what left; 0 is no harm (Hard-KV, appendix
        G). None where no query is watched or nothing was dropped.
        """
        return self.drifts / self.drops if self.drops else None

    @property
    def tokens_after(self) -> list[list[int]]:
        """The most of `held` that any sequence holds, [K][L]."""
        return [[max(sequences, default=0) for sequences in row] for row in self.held]

    @property
    def last_tokens(self) -> int:
        """Tokens one sequence holds while the last segment runs, or held last where generation ended before it."""
        return max(self.held[self._count_segments() - 1][-1], default=0)

    @property
    def last_bytes(self) -> int:
        """Bytes of one sequence when `last_tokens` are held."""
        return max(self.held_bytes[self._count_segments() - 1][-1], default=0)

    @property
    def peak_tokens(self) -> int:
        """Most tokens one sequence ever held between layers."""
        return max(max(row) for row in self.tokens_after)

    @property
    def sequence_bytes(self) -> int:
        """Most bytes of keys and values that one sequence ever held between layers."""
        return max(max(layer, default=0) for row in self.held_bytes for layer in row)

    def find_least_share(self, spec: ModelSpec, budget: Budget) -> float:
        """Return the least share that one sequence held after any segment of what it could hold then.

        That is the capacity, or all tokens so far where those are fewer; of a budget in bytes, the bytes that this part
        of the capacity has of the budget. Padding is no token; where it counts as held, it is taken off the capacity
        too, but for one token a head. The last segment is never held.
        """
        capacity, count = budget.capacity, min(self._count_segments(), len(self.held) - 1)
        if budget.bytes is None:
            held = [Fraction(max(row[-1])) for row in self.held[:count]]
        else:
            held = [max(row[-1]) * capacity / budget.bytes for row in self.held_bytes[:count]]
        heads, padding = spec.all_heads, spec.all_heads * self.padding
        could = [min(capacity, Fraction(heads * end)) for end in spec.ends[:count]]
        if padding and spec.padding_counts:
            could = [max(limit - padding, Fraction(heads)) for limit in could]
        elif padding:
            could = [min(capacity, Fraction(heads * end - padding)) for end in spec.ends[:count]]
        return float(min((tokens / limit for tokens, limit in zip(held, could, strict=True)), default=1.0))

    def trace(self, spec: ModelSpec, sequence: int, drawn: int | None = None) -> list[Step]:
        """Return what one sequence held after each segment that is cached.

        Args:
            spec: the whole model's shapes.
            sequence: its number.
            drawn: tokens of its text, whose later segments are left out: it had ended there; None of an image.
        """
        steps = []
        for k, end in enumerate(spec.ends[: min(self._count_segments(), len(self.held) - 1)]):
            if drawn is not None and end - spec.ends[0] >= drawn:
                break
            held = _pick(self.held[k][-1], sequence) / spec.all_heads
            longest = max(_pick(layer, sequence) for layer in self.longest[k])
            seen = [[_pick(part, sequence) for part in layer] for layer in self.lse[k]] if self.lse else []
            before, after = (fmean(layer) for layer in zip(*seen, strict=True)) if seen else (None, None)
            steps.append(Step(end, held, longest, before, after))
        return steps

    def _count_segments(self) -> int:
        """Return how many segments were run to their end."""
        return sum(max(row[-1], default=0) > 0 for row in self.held)


def find_utilisation(steps: Sequence[Step]) -> float | None:
    """Return slot utilisation: tokens held over slots of rows that all are as long as the longest, in (0, 1].

    It is the mean over the largest length of Hard-KV's Table 3 (overall over maximum sparsity), both summed over the
    segments from the first one after which a token was missing. None where none was.
    """
    dropped = [before.held + now.tokens - before.tokens - now.held > TINY for before, now in pairwise(steps)]
    if True not in dropped:
        return None
    since = steps[1 + dropped.index(True) :]
    return sum(step.held for step in since) / sum(step.longest for step in since)


def _pick(values: Sequence[N], sequence: int) -> N:
    """Return a sequence's value, which all have in common if there is one."""
    return values[sequence if len(values) > 1 else 0]


def add_ledgers(ledgers: Sequence[Ledger]) -> Ledger:
    """Return the ledger of a generation whose heads were shared out to several caches.

    Tokens are those that a sequence holds in all of them at once. Bytes are the sum of each one's peak, since each has
    a memory of its own.
    """
    counts = ("peak_bytes", "rebuild_bytes", "transient_bytes", "state_bytes", "drifts", "drops")
    return Ledger(
        _join([ledger.held for ledger in ledgers], sum),
        _join([ledger.longest for ledger in ledgers], max),
        ledgers[0].padding,
        _join([ledger.held_bytes for ledger in ledgers], sum),
        lse=[
            [_average(layer) for layer in zip(*row, strict=True)]
            for row in zip(*(ledger.lse for ledger in ledgers), strict=True)
        ],
        **{name: sum(getattr(ledger, name) for ledger in ledgers) for name in counts},
    )


def _join(tables: Sequence[Table], combine: Callable[[Sequence[int]], int]) -> Table:
    """Combine the numbers [K][L][sequences] of several caches."""
    return [
        [[combine(each) for each in zip(*layer, strict=True)] for layer in zip(*row, strict=True)]
        for row in zip(*tables, strict=True)
    ]


def _average(
    shares: Sequence[tuple[Sequence[float], Sequence[float]]],
) -> tuple[Sequence[float], Sequence[float]]:
    """Average what shares of equally many heads have before a drop, and after it."""
    before, after = ([fmean(each) for each in zip(*part, strict=True)] for part in zip(*shares, strict=True))
    return before, after


class Account:
    """Tokens that each sequence holds at the moment, per layer and in total.

    Sequences that all hold equally much share one number.

    Attributes:
        ledger: peaks of the generation.
        in_flight: bytes of the segment's keys and values that are not stored yet, of all sequences.

    Args:
        spec: the model's shapes.
        sequences: sequences with numbers of their own.
        watched: whether the log-sum-exp of queries is noted.
    """

    def __init__(self, spec: ModelSpec, sequences: int, *, watched: bool) -> None:
        held, longest, held_bytes = ([[[0]] * spec.layers for _ in spec.segments] for _ in range(3))
        lse: list[list[tuple[Sequence[float], Sequence[float]]]] = [[] for _ in spec.segments]
        self.ledger = Ledger(held, longest, held_bytes=held_bytes, lse=lse if watched else [])
        self.in_flight = 0
        self._stored = 0  # bytes of all stores
        self._tokens, self._bytes = [0] * sequences, [0] * sequences
        self._layers = [(self._tokens, self._bytes)] * spec.layers

    def note_transient(self, read_bytes: int) -> None:
        """Note the keys and values that exist beside what is kept: in flight, and so many bytes read back at a time."""
        self.ledger.transient_bytes = max(self.ledger.transient_bytes, self.in_flight + read_bytes)

    def note_change(self, before: int, after: int, rebuild: int = 0) -> None:
        """Note the bytes of a layer before and after a change of its storage, and the most at an instant of it."""
        self.ledger.rebuild_bytes = max(self.ledger.rebuild_bytes, self._stored - before + rebuild)
        self._stored += after - before

    def note_drift(self, segment: int, drift: Drift) -> None:
        """Note what a drop after a segment did to the queries that are watched."""
        self.ledger.drifts += drift.total
        self.ledger.drops += drift.rows
        if self.ledger.lse:
            self.ledger.lse[segment].append((drift.before, drift.after))

    def enter(
        self, segment: int, layer: int, stores: Sequence[LayerStore], spec: ModelSpec, method: Method
    ) -> None:
        """Enter what a layer holds after a segment.

        Args:
            segment: its index.
            layer: its index.
            stores: of all layers.
            spec: the model's shapes.
            method: prepared.

        Raises:
            BudgetExceeded: a strict method holds more than its budget.
        """
        counts, heads, ledger = stores[layer].layout.counts, spec.heads, self.ledger
        rows = [counts[row : row + heads] for row in range(0, len(counts), heads)]
        tokens, held_bytes = [*map(sum, rows)], stores[layer].count_sequence_bytes(heads, spec.branches)
        before, self._layers[layer] = self._layers[layer], (tokens, held_bytes)
        ledger.held[segment][layer] = self._tokens = _exchange(self._tokens, before[0], tokens)
        ledger.held_bytes[segment][layer] = self._bytes = _exchange(self._bytes, before[1], held_bytes)
        ledger.longest[segment][layer] = [*map(max, rows)]
        ledger.peak_bytes = max(ledger.peak_bytes, self._stored)
        if not method.static:
            ledger.state_bytes = max(ledger.state_bytes, sum(store.state_bytes for store in stores))
        budget = method.budget
        of_sequences, limit = (
            (self._tokens, budget.capacity) if budget.bytes is None else (self._bytes, budget.bytes)
        )
        if method.strict and (found := max(of_sequences, default=0)) > limit:
            raise BudgetExceeded(
                f"{type(method).__name__}: {found} {budget.unit} held after layer {layer} of segment {segment}, the "
                f"budget is {float(limit):.10g}; lower what the method keeps, or let it be `strict = False`"
            )


def _exchange(totals: Sequence[int], old: Sequence[int], new: Sequence[int]) -> list[int]:
    return [total - before + now for total, before, now in zip(totals, old, new, strict=True)]
