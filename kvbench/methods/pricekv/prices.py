"""Prices of capacity at each instant, and the lifetimes and precisions that each head by itself finds best at them."""

from itertools import pairwise

import numpy as np

from kvbench.methods.pricekv.problem import Allocation, Floats, Ints, Problem, count_held
from kvbench.methods.pricekv.sources import Sources, sum_sets

ITERATIONS = 160
STEP = 0.3
"""A price changes by this factor's exponential at most, at first; at iteration i by 1 / (1 + i / 40) of it."""


def find_prices(problem: Problem) -> Floats:
    """Find prices at which what heads want about fits, float64 [K (L + 1)] in error per unit of capacity.

    They rise where heads hold more than fits and fall where they hold less; where all that could ever be held fits,
    they are 0.

    Args:
        problem: what is to be allocated.
    """
    capacity = np.maximum(problem.capacity, 1)
    binding = count_held(problem, problem.hold_everything()) > problem.capacity
    empty = [errors[np.isfinite(errors).argmax(0), np.arange(problem.heads)] for errors in problem.errors]
    prices = binding * (sum(float(error.sum()) for error in empty) / (capacity.max() * max(binding.sum(), 1)))
    if not prices.any():  # nothing was measured, as in a plan
        return prices
    for iteration in range(ITERATIONS):
        held = count_held(problem, choose(problem, prices))
        excess = ((held - problem.capacity) / capacity).clip(-1, 1)
        prices = prices * np.exp(STEP / (1 + iteration / 40) * excess)
    return prices


def choose(problem: Problem, prices: Floats) -> Allocation:
    """Choose the lifetimes and precisions that cost each head least in errors, noise and rent together; exact.

    Whatever set a head holds, a source of a given lifetime has one best precision, since noises add up. So it is chosen
    first, and what a source costs that lives one consumer longer, its precision chosen anew, is added up over sets.

    Args:
        problem: what is to be allocated.
        prices: of capacity at each instant, float64 [K (L + 1)].
    """
    paid = np.concatenate(([0.0], prices.cumsum()))[problem.leaving]
    # Of a unit of capacity, for each consumer.
    rent = np.diff(paid, axis=0, prepend=paid[:1])[:, problem.layer]
    added, best = _choose_precisions(problem, rent)
    costs = [errors + sum_sets(more) for errors, more in zip(problem.errors, added, strict=True)]
    until = _choose_nested(costs, problem.sources) if problem.lifetimes else _choose_constant(costs)
    if best is None:
        return Allocation(until, np.zeros_like(until))
    sources, heads = np.arange(until.shape[1]), np.arange(problem.heads)
    return Allocation(until, best[sources, until, heads[:, None]])


def _choose_precisions(problem: Problem, rent: Floats) -> tuple[list[Floats], Ints | None]:
    """Choose the best precision of each source for each lifetime.

    Args:
        problem: what is to be allocated.
        rent: of a unit of capacity, for each consumer and head, float64 [K, T].

    Returns:
        Of every consumer what each of its sources costs more if it is the last to have it and not the one before,
        float64 [sources, T]; and the precisions, int64 [K - 1, K, T], or None where there is one precision.
    """
    if problem.precisions == 1:
        noise, sizes = problem.noise[:, 0], problem.sizes
        chosen = [list(sources) for sources in problem.sources]
        return [noise[i, k] - noise[i, k - 1] + sizes[i] * rent[k] for k, i in enumerate(chosen)], None
    held = np.arange(problem.segments) > np.arange(problem.segments - 1)[:, None]
    paid = (held[:, :, None] * rent).cumsum(1)
    total = problem.noise + problem.sizes[:, :, None, None] * paid[:, None]
    more = np.diff(total.min(1), axis=1, prepend=0)
    return [more[list(sources), k] for k, sources in enumerate(problem.sources)], total.argmin(1)


def _choose_nested(costs: list[Floats], sources: Sources) -> Ints:
    """Go backwards over the consumers, then forwards: each set comes out of the one before and the newest source."""
    last = len(costs) - 1
    carried = [_carry(now, then) for now, then in pairwise(sources)]
    for k in range(last - 1, 0, -1):
        without, including = np.split(costs[k + 1], 2)
        cheapest = _find_least_subset(np.minimum(without, including))
        costs[k] += cheapest if len(cheapest) == len(costs[k]) else cheapest[carried[k]]
    heads = costs[0].shape[1]
    held = np.zeros(heads, np.int64)
    until = np.tile(np.arange(last), (heads, 1))
    for k in range(1, last + 1):
        may_hold = carried[k - 1][held] | 1 << (len(sources[k]) - 1)
        allowed = (np.arange(len(costs[k]))[:, None] & ~may_hold) == 0
        held = np.where(allowed, costs[k], np.inf).argmin(0)
        for bit, source in enumerate(sources[k]):
            until[held >> bit & 1 == 1, source] = k
    return until


def _carry(now: tuple[int, ...], then: tuple[int, ...]) -> Ints:
    """Return what is left of each set of a consumer's sources among the next one's."""
    left = [1 << then.index(source) if source in then else 0 for source in now]
    return sum_sets(np.array(left, np.int64))


def _choose_constant(costs: list[Floats]) -> Ints:
    """Choose among the sets that a head holds to the end, where each consumer has all sources before it."""
    last = len(costs) - 1
    total = sum((costs[k][np.arange(1 << last) & ((1 << k) - 1)] for k in range(last)), costs[last])
    held = total.argmin(0)
    return np.where(held[:, None] >> np.arange(last) & 1, last, np.arange(last))


def _find_least_subset(values: Floats) -> Floats:
    """Return for each set the least value of its subsets, [2^n, T]; `values` is overwritten."""
    sets, heads = values.shape
    for bit in range(sets.bit_length() - 1):
        pairs = values.reshape(-1, 2, 1 << bit, heads)
        np.minimum(pairs[:, 1], pairs[:, 0], out=pairs[:, 1])
    return values
