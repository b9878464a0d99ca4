"""Peaks of what a cache held during one generation."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from kvbench.core.segments import ModelSpec


@dataclass
class Ledger:
    """Peaks of one generation.

    Attributes:
        held: tokens that each sequence holds after layer l of segment k, [K][L][sequences], one number if all hold as
            many; the last row is what is held while the last segment runs. Rows are 0 from where a text ended early.
        peak_bytes: storage between layers, whole batch.
        rebuild_bytes: storage at the worst instant of a rebuild, whole batch.
        transient_bytes: keys and values of the segment in flight, whole batch.
        state_bytes: what the method keeps beside them (a score per slot, the last segment's keys), whole batch.
        padding: tokens that no prompt of the batch has, of as many as the model's prompts may have.
        drifts: nats by which drops changed the log-sum-exp of watched queries, summed over layers, segments and rows.
        drops: how many rows dropped anything, of all layers and segments.
    """

    held: list[list[list[int]]]
    peak_bytes: int = 0
    rebuild_bytes: int = 0
    transient_bytes: int = 0
    state_bytes: int = 0
    padding: int = 0
    drifts: float = 0.0
    drops: int = 0

    @property
    def lse_drift(self) -> float | None:
        """What a drop does to the log-sum-exp of the queries that are watched, in nats, a mean over rows and drops.

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
    def peak_tokens(self) -> int:
        """Most tokens one sequence ever held between layers."""
        return max(max(row) for row in self.tokens_after)

    def find_least_share(self, spec: ModelSpec, capacity: Fraction) -> float:
        """Return the least share that one sequence held after any segment of what it could hold then.

        That is the capacity, or all tokens so far where those are fewer, less the padding, which counts as held but
        for one token a head. The last segment is never held.
        """
        count = min(self._count_segments(), len(self.held) - 1)
        held = [max(row[-1]) for row in self.held[:count]]
        heads, padding = spec.all_heads, spec.all_heads * self.padding
        could = [min(capacity, Fraction(heads * end)) for end in spec.ends[:count]]
        if padding:
            could = [max(most - padding, Fraction(heads)) for most in could]
        return float(min((tokens / most for tokens, most in zip(held, could, strict=True)), default=1.0))

    def _count_segments(self) -> int:
        """Return how many segments were run to their end."""
        return sum(max(row[-1], default=0) > 0 for row in self.held)


def add_ledgers(ledgers: Sequence[Ledger]) -> Ledger:
    """Return the ledger of a generation whose heads were shared out to several caches.

    Tokens are those that a sequence holds in all of them at once. Bytes are the sum of each one's peak, since each has
    a memory of its own.
    """
    rows = zip(*(ledger.held for ledger in ledgers), strict=True)
    return Ledger(
        [
            [[sum(each) for each in zip(*layer, strict=True)] for layer in zip(*row, strict=True)]
            for row in rows
        ],
        peak_bytes=sum(ledger.peak_bytes for ledger in ledgers),
        rebuild_bytes=sum(ledger.rebuild_bytes for ledger in ledgers),
        transient_bytes=sum(ledger.transient_bytes for ledger in ledgers),
        state_bytes=sum(ledger.state_bytes for ledger in ledgers),
        padding=ledgers[0].padding,
        drifts=sum(ledger.drifts for ledger in ledgers),
        drops=sum(ledger.drops for ledger in ledgers),
    )
