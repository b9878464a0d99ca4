"""Account of what a cache holds at the moment, which fills a ledger and enforces the budget."""

from collections.abc import Sequence

from kvbench.core.config import UserError
from kvbench.core.segments import ModelSpec
from kvbench.engine.ledger import Ledger
from kvbench.engine.schedule import Drift
from kvbench.engine.view import LayerStore
from kvbench.methods.base import Method


class BudgetExceeded(UserError, RuntimeError):
    """A method kept more than its budget; the message names method, segment, layer, and tokens or bytes."""


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
