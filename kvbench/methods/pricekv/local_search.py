"""Local search over lifetimes and precisions: makes an allocation feasible, fills free capacity, exchanges blocks."""

import numpy as np

from kvbench.methods.pricekv.problem import (
    Allocation,
    Bools,
    Problem,
    find_sets,
    measure_usage,
    sum_error,
)
from kvbench.methods.shared.capacities import Floats, Ints

MAX_INT = np.iinfo(np.int64).max
MAX_TRIALS = 30_000
"""Maximum product of tried exchanges, heads and precisions. Small models, whose blocks are large compared to the
capacity, run out of promising exchanges earlier; large models have little to gain."""

BlockChange = tuple[int, int, int, int]
"""Head, source, new lifetime and new precision of a changed block."""


def shorten(problem: Problem, allocation: Allocation, fixed: Bools | None = None) -> Allocation:
    """Shorten lifetimes and lower precisions until the allocation is feasible.

    Greedy: take the change with the smallest added error per freed unit and step, counting only steps and units over
    capacity. Blocks in `fixed`, bool [T, K - 1], do not change.

    Raises:
        ValueError: the fixed and forced blocks exceed the capacity.
    """
    allocation = allocation.copy()
    while (excess := measure_usage(problem, allocation) - problem.capacity).max() > 0:
        added = find_changes(problem, allocation)
        if fixed is not None:
            added[fixed] = np.inf
        freed = _measure_freed(problem, allocation, excess)
        ratio = np.full(added.shape, np.inf)
        np.divide(added, freed, out=ratio, where=freed > 0)
        if np.isinf(ratio.min()):
            raise ValueError("the fixed and forced sources alone exceed the capacity")
        for change in _find_best_changes(ratio):
            decrease = -_measure_increase(problem, allocation, change)
            # Earlier changes reduced the excess: skip a change that frees less than half of its rated memory.
            if 2 * np.minimum(excess.clip(0), decrease).sum() >= freed[change]:
                _apply(allocation, change)
                excess -= decrease
    return allocation


def lengthen(problem: Problem, allocation: Allocation) -> Allocation:
    """Lengthen lifetimes and raise precisions of a feasible allocation until no harmless change fits.

    Greedy: take the change that reduces the error most per added unit and step.
    """
    allocation = allocation.copy()
    free = problem.capacity - measure_usage(problem, allocation)
    while True:
        added = find_changes(problem, allocation)
        growth = _measure_growth(problem, allocation)
        fits = (growth > 0) & (added <= 0) & _find_fitting(problem, allocation, free)
        if not fits.any():
            return allocation
        ratio = np.full(added.shape, np.inf)
        np.divide(added, growth, out=ratio, where=fits)
        for change in _find_best_changes(ratio):
            remaining = free - _measure_increase(problem, allocation, change)
            if remaining.min() >= 0:
                _apply(allocation, change)
                free = remaining


def exchange(problem: Problem, allocation: Allocation, prices: Floats) -> Allocation:
    """Exchange blocks of a feasible allocation while that lowers the error.

    An exchange lengthens or refines one block, frees capacity by `shorten` and fills the remainder by `lengthen`.
    Changes are tried in the order of the promised gain: the error saved minus the price of the missing capacity, at
    prices float64 [K (L + 1)].
    """
    trials, improved = MAX_TRIALS // (problem.heads * problem.precisions), True
    while improved:
        error, improved = sum_error(problem, allocation), False
        for change in _list_promising(problem, allocation, prices, trials):
            trials -= 1
            candidate = _exchange_block(problem, allocation, change)
            if candidate is not None and sum_error(problem, candidate) < error:
                allocation, improved = candidate, True
                break
    return allocation


def find_changes(problem: Problem, allocation: Allocation) -> Floats:
    """Return the change of a head's error for every new lifetime and precision of a source, float64 [T, K - 1, K, F].

    Entry [h, i, d, f] is for source i of head h, lifetime d and precision f; infinite if not allowed.
    """
    until, precision = allocation
    (heads, sources), count = until.shape, problem.segments
    sets, rows = find_sets(problem, until), np.arange(heads)
    added = np.full((heads, sources, count), np.inf)
    added[:, : problem.forced, -1] = 0
    for source in range(problem.forced, sources):
        gains = np.zeros((count, heads))  # error with the source minus error without it, at each target
        for k in range(source + 1, count):
            if source in problem.sources[k]:
                bit, errors = 1 << problem.sources[k].index(source), problem.errors[k]
                gains[k] = errors[sets[k] | bit, rows] - errors[sets[k] & ~bit, rows]
        total = gains.cumsum(0)
        added[:, source, source:] = (total[source:] - total[until[:, source], rows]).T
    noise = problem.noise[np.arange(sources), precision, until, rows[:, None]]
    return added[..., None] + (problem.noise.transpose(3, 0, 2, 1) - noise[..., None, None])


def _apply(allocation: Allocation, change: BlockChange) -> None:
    """Set the new lifetime and precision of one block in place."""
    head, source, end, precision = change
    allocation.until[head, source], allocation.precision[head, source] = end, precision


def _exchange_block(problem: Problem, allocation: Allocation, change: BlockChange) -> Allocation | None:
    """Apply a change, shorten other blocks until it fits, then lengthen; None if these cannot free enough."""
    candidate, fixed = allocation.copy(), np.zeros(allocation.until.shape, bool)
    _apply(candidate, change)
    fixed[change[:2]] = True
    try:
        feasible = shorten(problem, candidate, fixed)
    except ValueError:
        return None
    return lengthen(problem, feasible)


def _list_promising(
    problem: Problem, allocation: Allocation, prices: Floats, limit: int
) -> list[BlockChange]:
    """Return at most `limit` changes that save more error than their missing capacity costs, best first."""
    free = problem.capacity - measure_usage(problem, allocation)
    costs = find_changes(problem, allocation)
    costs += _price_missing(problem, allocation, free, prices)
    promising = np.argwhere(costs < 0)
    order = costs[tuple(promising.T)].argsort(kind="stable")
    return [
        (head, source, end, precision) for head, source, end, precision in promising[order[:limit]].tolist()
    ]


def _find_best_changes(ratio: Floats) -> list[BlockChange]:
    """Return each head's change of smallest ratio, in rising order; heads without a finite ratio are left out.

    If any ratio is negative, changes of ratio 0 are left out.
    """
    flat = ratio.reshape(len(ratio), -1)
    best = flat.argmin(1)
    smallest = flat[np.arange(len(flat)), best]
    heads = smallest.argsort(kind="stable")
    heads = heads[smallest[heads] < (0 if smallest.min() < 0 else np.inf)]
    changes = np.unravel_index(best[heads], ratio.shape[1:])
    return list(zip(heads.tolist(), *(indices.tolist() for indices in changes), strict=True))


def _measure_increase(problem: Problem, allocation: Allocation, change: BlockChange) -> Ints:
    """Return the memory that a change adds at each step, int64 [K (L + 1)]."""
    head, source, end, precision = change
    steps, increase = problem.end_steps[:, problem.layer[head]], np.zeros_like(problem.capacity)
    increase[steps[source] : steps[end]] += problem.sizes[source, precision]
    size = problem.sizes[source, allocation.precision[head, source]]
    increase[steps[source] : steps[allocation.until[head, source]]] -= size
    return increase


def _measure_growth(problem: Problem, allocation: Allocation) -> Ints:
    """Return the memory that each change adds, summed over steps, int64 [T, K - 1, K, F]."""
    until, precision = allocation
    sources, starts = np.arange(until.shape[1]), problem.end_steps[:-1, problem.layer].T
    usage = problem.sizes[sources, precision] * (problem.end_steps[until, problem.layer[:, None]] - starts)
    durations = problem.end_steps.T[problem.layer][:, None] - starts[..., None]
    return problem.sizes[:, None] * durations[..., None] - usage[..., None, None]


def _measure_freed(problem: Problem, allocation: Allocation, excess: Ints) -> Ints:
    """Return the excess memory that each change frees, summed over steps, int64 [T, K - 1, K, F].

    `excess` is the memory over capacity at each step, int64 [K (L + 1)]. The result is 0 for changes that free nothing,
    lengthen a lifetime or raise a precision.
    """
    (until, precision), layer = allocation, problem.layer[:, None]
    sizes, sources = problem.sizes, np.arange(until.shape[1])
    smaller = (sizes[:, :, None] - sizes[:, None]).clip(0)

    def accumulate(freed: Ints) -> Ints:
        """Sum freed memory [...], at most the excess, up to each step: int64 [..., K (L + 1) + 1]."""
        counted = excess.clip(0, freed[..., None])
        return np.pad(counted.cumsum(-1), [*[(0, 0)] * freed.ndim, (1, 0)])

    dropped, lowered = accumulate(sizes), accumulate(smaller).swapaxes(2, 3)
    ends, starts = problem.end_steps.T[layer], problem.end_steps[sources, layer]
    of_block = (sources[:, None], precision[..., None])
    freed = dropped[*of_block, problem.end_steps[until, layer][..., None]] - dropped[*of_block, ends]
    freed = freed[..., None] + lowered[*of_block, ends] - lowered[*of_block, starts[..., None]]
    longer = np.arange(problem.segments) > until[..., None]
    larger = sizes > sizes[sources, precision][..., None]
    freed[longer[..., None] | larger[:, :, None]] = 0
    return freed


def _find_fitting(problem: Problem, allocation: Allocation, free: Ints) -> Bools:
    """Return which changes fit into the free capacity, bool [T, K - 1, K, F]."""
    (until, precision), layer = allocation, problem.layer[:, None, None]
    count, steps, sources = problem.segments, problem.end_steps, np.arange(until.shape[1])
    smallest = np.full((count, problem.layers), MAX_INT)
    for k in range(1, count):
        for c in range(problem.layers):
            smallest[k, c] = free[steps[k - 1, c] : steps[k, c]].min()
    between = np.full((problem.layers, count, count), MAX_INT)
    for k in range(count - 1):
        between[:, k, k + 1 :] = np.minimum.accumulate(smallest[k + 1 :]).T
    now, ends = until[..., None], np.arange(count)
    common = between[layer, sources[:, None], np.minimum(now, ends)]
    larger = problem.sizes - problem.sizes[sources, precision][..., None]
    return (larger[:, :, None] <= common[..., None]) & (
        problem.sizes[:, None] <= between[layer, now, ends][..., None]
    )


def _price_missing(problem: Problem, allocation: Allocation, free: Ints, prices: Floats) -> Floats:
    """Return the price of the capacity that each change lacks, float64 [T, K - 1, K, F]."""
    (until, precision), layer = allocation, problem.layer[:, None]
    sizes, sources = problem.sizes, np.arange(until.shape[1])

    def accumulate(needed: Ints) -> Floats:
        """Sum the price of missing capacity [..., F] up to each step: [..., K (L + 1) + 1, F]."""
        costs = prices[:, None] * (needed[..., None, :] - free[:, None]).clip(0)
        return np.pad(costs.cumsum(-2), [*[(0, 0)] * (needed.ndim - 1), (1, 0), (0, 0)])

    longer, larger = accumulate(sizes), accumulate(sizes[:, None] - sizes[:, :, None])
    steps, column = problem.end_steps, sources[:, None]
    starts, now, ends = steps[sources, layer][..., None], steps[until, layer][..., None], steps.T[layer]
    common, last = np.minimum(now, ends), np.maximum(now, ends)
    of_block = (column, precision[..., None])
    return larger[*of_block, common] - larger[*of_block, starts] + longer[column, last] - longer[column, now]
