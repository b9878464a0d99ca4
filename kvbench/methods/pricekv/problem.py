"""The allocation as a problem: what errors there are, what is in the cache when, and how much fits.

Consumer k is segment k while it runs; source i is segment i for the consumers after it. A head may hold source i from
consumer i + 1 on, and once dropped it never comes back: what a head holds is two numbers per source, its lifetime, the
last consumer that still has it (i itself: it is never held), and its precision, how its numbers are stored all the
while. Time is counted in instants: instant k (L + 1) + c is when segment k has run through c of the L layers. Room is
counted in tokens where there is one precision, and in bytes where there are several.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvbench.methods.pricekv.sources import Sources

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class Allocation(NamedTuple):
    """Tokens of every source that every head holds.

    Attributes:
        until: lifetimes, int64 [T, K - 1].
        precision: numbers of the precisions, int64 [T, K - 1]; of what is never held they do not matter.
    """

    until: Ints
    precision: Ints


@dataclass(frozen=True)
class Problem:
    """Input of an allocation; T = L x H heads, layer by layer, and F precisions.

    Attributes:
        errors: of every consumer, float64 [sets, T]: what each set of its sources costs each head; infinite for sets
            that lack a forced source.
        sources: of every consumer, K of them.
        sizes: capacity that a block of each source takes in each precision, int64 [K - 1, F], none larger than in the
            first.
        noise: what a head pays beside `errors` for having a source in a precision, summed over the consumers up to each
            one that has it among its sources, float64 [K - 1, F, K, T].
        layers: layers L.
        capacity: what sources may take at each instant, int64 [K (L + 1)].
        forced: leading sources that all heads hold to the end.
        lifetimes: sources may be dropped before the end; otherwise what a head holds at all it holds to the end.
    """

    errors: tuple[Floats, ...]
    sources: Sources
    sizes: Ints
    noise: Floats
    layers: int
    capacity: Ints
    forced: int = 0
    lifetimes: bool = True

    @property
    def segments(self) -> int:
        """Segments K."""
        return len(self.sources)

    @property
    def precisions(self) -> int:
        """Forms F."""
        return self.sizes.shape[1]

    @property
    def heads(self) -> int:
        """All heads T."""
        return self.errors[0].shape[1]

    @cached_property
    def layer(self) -> Ints:
        """Layer of each head, int64 [T]."""
        return np.arange(self.layers).repeat(self.heads // self.layers)

    @cached_property
    def leaving(self) -> Ints:
        """Instant at which a source of lifetime k leaves a layer, int64 [K, L]; source k enters then.

        What the last consumer has stays to the end.
        """
        instants = np.arange(self.segments)[:, None] * (self.layers + 1) + np.arange(self.layers) + 1
        instants[-1] = self.segments * (self.layers + 1)
        return instants

    def hold_everything(self) -> Allocation:
        """Return the full cache, in the largest precision."""
        until = np.full((self.heads, self.segments - 1), self.segments - 1)
        return Allocation(until, np.zeros_like(until))


def be_noiseless(segments: int, heads: int) -> Floats:
    """Return the noise of one precision in which nothing is lost, float64 [K - 1, 1, K, T] that takes no memory."""
    return np.broadcast_to(0.0, (segments - 1, 1, segments, heads))


def find_sets(problem: Problem, until: Ints) -> Ints:
    """Return which sets of its sources each consumer finds in each head: int64 [K, T] of lifetimes [T, K - 1]."""
    sets = np.zeros((problem.segments, problem.heads), np.int64)
    for k, sources in enumerate(problem.sources):
        for bit, source in enumerate(sources):
            sets[k] |= (until[:, source] >= k).astype(np.int64) << bit
    return sets


def count_held(problem: Problem, holding: Allocation) -> Ints:
    """Count what sources take in the cache at each instant, int64 [K (L + 1)]."""
    change = np.zeros(len(problem.capacity) + 1, np.int64)
    for source, sizes in enumerate(problem.sizes):
        taken = sizes[holding.precision[:, source]]
        np.add.at(change, problem.leaving[source, problem.layer], taken)
        np.subtract.at(change, problem.leaving[holding.until[:, source], problem.layer], taken)
    return change.cumsum()[:-1]


def sum_error(problem: Problem, holding: Allocation) -> float:
    """Sum what all consumers and heads pay in errors and noise."""
    sets, heads = find_sets(problem, holding.until), np.arange(problem.heads)
    errors = sum(of_sets[sets[k], heads].sum() for k, of_sets in enumerate(problem.errors))
    sources = np.arange(problem.segments - 1)
    return float(errors + problem.noise[sources, holding.precision, holding.until, heads[:, None]].sum())
