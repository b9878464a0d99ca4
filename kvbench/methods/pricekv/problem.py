"""The allocation problem of PriceKV: errors, memory use and capacity over time.

While target segment k runs, a head attends to the sources (earlier segments) that it stores. It stores source
i from target i + 1 on and never gets it back once it is dropped. A head's allocation has two values per source: the
lifetime, which is the last target that has the source (i: never stored), and the precision, which does not change.
Step k (L + 1) + c is the state of the cache when segment k has passed c of the L layers. Capacity is in tokens if there
is one precision and in bytes otherwise.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvbench.core.segments import ModelSpec
from kvbench.methods.shared.capacities import Floats, Ints

Bools = NDArray[np.bool_]
Number = TypeVar("Number", np.int64, np.float64)
Sources = tuple[tuple[int, ...], ...]
"""Sources of each segment, in order. A set of sources is a bit mask: bit j is the j-th source."""


class Allocation(NamedTuple):
    """Lifetime and precision of every source in every head.

    Attributes:
        until: lifetimes, int64 [T, K - 1].
        precision: indices of precisions, int64 [T, K - 1]; arbitrary for sources that are never stored.
    """

    until: Ints
    precision: Ints

    def copy(self) -> "Allocation":
        """Return a copy with arrays of its own."""
        return Allocation(self.until.copy(), self.precision.copy())


@dataclass(frozen=True)
class Problem:
    """Input of an allocation for K segments, F precisions and T = L x H heads, ordered by layer.

    Attributes:
        errors: K arrays, float64 [sets, T]: error of each head at a target for each set of its sources; infinite for
            sets that lack a forced source.
        sources: sources of each target.
        sizes: size of a source's block in each precision, int64 [K - 1, F]; the first precision is the largest.
        noise: error that storing a source in a precision adds to `errors`, summed over the targets up to each one,
            float64 [K - 1, F, K, T].
        layers: number of layers L.
        capacity: capacity at each step, int64 [K (L + 1)].
        forced: number of leading sources that all heads store to the end.
    """

    errors: tuple[Floats, ...]
    sources: Sources
    sizes: Ints
    noise: Floats
    layers: int
    capacity: Ints
    forced: int = 0

    @property
    def segments(self) -> int:
        """Number of segments K."""
        return len(self.sources)

    @property
    def precisions(self) -> int:
        """Number of precisions F."""
        return self.sizes.shape[1]

    @property
    def heads(self) -> int:
        """Number of heads T in all layers."""
        return self.errors[0].shape[1]

    @cached_property
    def layer(self) -> Ints:
        """Layer of each head, int64 [T]."""
        return np.arange(self.layers).repeat(self.heads // self.layers)

    @cached_property
    def end_steps(self) -> Ints:
        """Step at which a source of lifetime k leaves a layer, int64 [K, L]; source k enters at the same step.

        Sources that the last target has are stored to the end.
        """
        steps = np.arange(self.segments)[:, None] * (self.layers + 1) + np.arange(self.layers) + 1
        steps[-1] = self.segments * (self.layers + 1)
        return steps

    def full_allocation(self) -> Allocation:
        """Return the allocation that keeps every source in the largest precision."""
        until = np.full((self.heads, self.segments - 1), self.segments - 1)
        return Allocation(until, np.zeros_like(until))


def make_zero_noise(segments: int, heads: int) -> Floats:
    """Return the noise of one lossless precision, a view without memory: float64 [K - 1, 1, K, T]."""
    return np.broadcast_to(0.0, (segments - 1, 1, segments, heads))


def list_sources(spec: ModelSpec, recent: int) -> Sources:
    """Return the sources of each segment: all earlier segments, or the first and the `recent` newest earlier segments.

    The latter is for next-token models, which have too many segments for sets of all of them.
    """
    count = len(spec.segments)
    recent = count if spec.family == "next-scale" else recent
    return tuple(tuple(i for i in range(k) if i == 0 or i >= k - recent) for k in range(count))


def sum_sets(values: NDArray[Number]) -> NDArray[Number]:
    """Sum the values of each set: [2^n, ...] from values [n, ...].

    >>> sum_sets(np.array([1, 4, 9])).tolist()
    [0, 1, 4, 5, 9, 10, 13, 14]
    """
    sums = np.zeros((1, *values.shape[1:]), values.dtype)
    for value in values:
        sums = np.concatenate((sums, sums + value))
    return sums


def find_sets(problem: Problem, until: Ints) -> Ints:
    """Return the set of sources that each target has in each head: int64 [K, T] from lifetimes [T, K - 1]."""
    sets = np.zeros((problem.segments, problem.heads), np.int64)
    for k, sources in enumerate(problem.sources):
        for bit, source in enumerate(sources):
            sets[k] |= (until[:, source] >= k).astype(np.int64) << bit
    return sets


def measure_usage(problem: Problem, allocation: Allocation) -> Ints:
    """Return the memory use at each step, in units of the capacity: int64 [K (L + 1)]."""
    change = np.zeros(len(problem.capacity) + 1, np.int64)
    for source, sizes in enumerate(problem.sizes):
        sizes_of_heads = sizes[allocation.precision[:, source]]
        np.add.at(change, problem.end_steps[source, problem.layer], sizes_of_heads)
        np.subtract.at(change, problem.end_steps[allocation.until[:, source], problem.layer], sizes_of_heads)
    return change.cumsum()[:-1]


def sum_error(problem: Problem, allocation: Allocation) -> float:
    """Return the sum of errors and noise over all targets and heads."""
    sets, heads = find_sets(problem, allocation.until), np.arange(problem.heads)
    errors = sum(of_sets[sets[k], heads].sum() for k, of_sets in enumerate(problem.errors))
    sources = np.arange(problem.segments - 1)
    return float(
        errors + problem.noise[sources, allocation.precision, allocation.until, heads[:, None]].sum()
    )
