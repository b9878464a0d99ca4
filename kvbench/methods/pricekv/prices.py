"""Lagrange multipliers (prices) of the capacity at each step, and the optimal allocation of heads at given prices."""

from itertools import pairwise

import numpy as np

from kvbench.methods.pricekv.problem import (
    Allocation,
    Problem,
    Sources,
    measure_usage,
    sum_sets,
)
from kvbench.methods.shared.capacities import Floats, Ints

ITERATIONS = 160
"""Updates of the prices, chosen by kvbench; `local_search` repairs what remains."""
STEP_SIZE = 0.3
"""Maximum change of a log price in the first iteration; iteration i uses 1 / (1 + i / 40) of it."""


def find_prices(problem: Problem) -> Floats:
    """Return prices at which the heads' allocations roughly meet the capacity, float64 [K (L + 1)], in error per unit.

    This is a multiplicative subgradient method: a price rises where the heads exceed the capacity and falls where they
    do not reach it. It is 0 at steps where the full cache fits.
    """
    capacity = np.maximum(problem.capacity, 1)
    binding = measure_usage(problem, problem.full_allocation()) > problem.capacity
    empty = [errors[np.isfinite(errors).argmax(0), np.arange(problem.heads)] for errors in problem.errors]
    prices = binding * (sum(float(error.sum()) for error in empty) / (capacity.max() * max(binding.sum(), 1)))
    if not prices.any():  # all errors are 0, for example in a plan
        return prices
    for iteration in range(ITERATIONS):
        usage = measure_usage(problem, minimize_lagrangian(problem, prices))
        excess = ((usage - problem.capacity) / capacity).clip(-1, 1)
        prices = prices * np.exp(STEP_SIZE / (1 + iteration / 40) * excess)
    return prices


def minimize_lagrangian(problem: Problem, prices: Floats) -> Allocation:
    """Minimise each head's error, noise and cost of memory at prices [K (L + 1)], exactly, by dynamic programming.

    Noises add up, so a source of a given lifetime has one best precision, independent of the other sources, which is
    found first. The cost of one more target, with the precision chosen anew, is then added up over sets of sources.
    """
    cumulative = np.concatenate(([0.0], prices.cumsum()))[problem.end_steps]
    unit_costs = np.diff(cumulative, axis=0, prepend=cumulative[:1])[:, problem.layer]
    added, best = _choose_precisions(problem, unit_costs)
    costs = [errors + sum_sets(more) for errors, more in zip(problem.errors, added, strict=True)]
    until = _choose_nested(costs, problem.sources)
    if best is None:
        return Allocation(until, np.zeros_like(until))
    sources, heads = np.arange(until.shape[1]), np.arange(problem.heads)
    return Allocation(until, best[sources, until, heads[:, None]])


def _choose_precisions(problem: Problem, unit_costs: Floats) -> tuple[list[Floats], Ints | None]:
    """Choose the best precision of each source for each lifetime.

    `unit_costs`, float64 [K, T], is the cost of a unit of capacity during each target. Returns the added cost of a
    source whose lifetime is extended to each target, K arrays, float64 [sources, T], and the precisions, int64 [K - 1,
    K, T]; None if there is one precision.
    """
    if problem.precisions == 1:
        noise, sizes = problem.noise[:, 0], problem.sizes
        indices = [list(sources) for sources in problem.sources]
        return [noise[i, k] - noise[i, k - 1] + sizes[i] * unit_costs[k] for k, i in enumerate(indices)], None
    is_stored = np.arange(problem.segments) > np.arange(problem.segments - 1)[:, None]
    paid = (is_stored[:, :, None] * unit_costs).cumsum(1)
    total = problem.noise + problem.sizes[:, :, None, None] * paid[:, None]
    more = np.diff(total.min(1), axis=1, prepend=0)
    return [more[list(sources), k] for k, sources in enumerate(problem.sources)], total.argmin(1)


def _choose_nested(costs: list[Floats], sources: Sources) -> Ints:
    """Return lifetimes, int64 [T, K - 1], of the best sets, subsets of the previous set plus the newest source."""
    last = len(costs) - 1
    remaining = [_map_sets(now, then) for now, then in pairwise(sources)]
    for k in range(last - 1, 0, -1):
        without, including = np.split(costs[k + 1], 2)
        cheapest = _find_cheapest_subset(np.minimum(without, including))
        costs[k] += cheapest if len(cheapest) == len(costs[k]) else cheapest[remaining[k]]
    heads = costs[0].shape[1]
    sets = np.zeros(heads, np.int64)
    until = np.tile(np.arange(last), (heads, 1))
    for k in range(1, last + 1):
        available = remaining[k - 1][sets] | 1 << (len(sources[k]) - 1)
        allowed = (np.arange(len(costs[k]))[:, None] & ~available) == 0
        sets = np.where(allowed, costs[k], np.inf).argmin(0)
        for bit, source in enumerate(sources[k]):
            until[sets >> bit & 1 == 1, source] = k
    return until


def _map_sets(now: tuple[int, ...], then: tuple[int, ...]) -> Ints:
    """Map each set of one target's sources to a set of the next target's sources, int64 [2^n]."""
    bits = [1 << then.index(source) if source in then else 0 for source in now]
    return sum_sets(np.array(bits, np.int64))


def _find_cheapest_subset(values: Floats) -> Floats:
    """Return the minimum value among the subsets of each set, float64 [2^n, T]; `values` is overwritten."""
    sets, heads = values.shape
    for bit in range(sets.bit_length() - 1):
        pairs = values.reshape(-1, 2, 1 << bit, heads)
        np.minimum(pairs[:, 1], pairs[:, 0], out=pairs[:, 1])
    return values
