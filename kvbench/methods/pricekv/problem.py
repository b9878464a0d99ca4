"""The allocation as a problem: what errors there are, what is in the cache when, and how much fits.

Consumer k is segment k while it runs; source i is segment i for the consumers after it. A head may hold source i from
consumer i + 1 on, and once dropped it never comes back: what a head holds is one number per source, its lifetime, the
last consumer that still has it (i itself: it is never held). Time is counted in instants: instant k (L + 1) + c is when
segment k has run through c of the L layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kvbench.methods.pricekv.sources import Sources

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Problem:
    """What an allocation is given; T = L x H heads, layer by layer.

    Attributes:
        errors: of every consumer, float64 [sets, T]: what each set of its sources costs each head; infinite for sets
            that lack a forced source.
        sources: of every consumer, K of them.
        lengths: tokens of each segment.
        layers: layers L.
        capacity: tokens of sources that fit at each instant, int64 [K (L + 1)].
        forced: leading sources that all heads hold to the end.
    """

    errors: tuple[Floats, ...]
    sources: Sources
    lengths: Sequence[int]
    layers: int
    capacity: Ints
    forced: int = 0

    @property
    def segments(self) -> int:
        """Segments K."""
        return len(self.lengths)

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

    def hold_everything(self) -> Ints:
        """Return the lifetimes of the full cache, int64 [T, K - 1]."""
        return np.full((self.heads, self.segments - 1), self.segments - 1)


def find_sets(problem: Problem, until: Ints) -> Ints:
    """Return which sets of its sources each consumer finds in each head: int64 [K, T] of lifetimes [T, K - 1]."""
    sets = np.zeros((problem.segments, problem.heads), np.int64)
    for k, sources in enumerate(problem.sources):
        for bit, source in enumerate(sources):
            sets[k] |= (until[:, source] >= k).astype(np.int64) << bit
    return sets


def count_held(problem: Problem, until: Ints) -> Ints:
    """Count the tokens of sources that are in the cache at each instant, int64 [K (L + 1)]."""
    change = np.zeros(len(problem.capacity) + 1, np.int64)
    for source, length in enumerate(problem.lengths[:-1]):
        np.add.at(change, problem.leaving[source, problem.layer], length)
        np.subtract.at(change, problem.leaving[until[:, source], problem.layer], length)
    return change.cumsum()[:-1]


def sum_error(problem: Problem, until: Ints) -> float:
    """Sum the errors of all consumers and heads under these lifetimes."""
    sets, heads = find_sets(problem, until), np.arange(problem.heads)
    return float(sum(errors[sets[k], heads].sum() for k, errors in enumerate(problem.errors)))
