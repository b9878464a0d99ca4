"""Greedy changes of lifetimes and precisions, until everything fits and then while capacity is left."""

import numpy as np

from kvbench.methods.pricekv.problem import Allocation, Bools, Floats, Ints, Problem, count_held, find_sets

A_LOT = np.iinfo(np.int64).max


def shorten(problem: Problem, holding: Allocation, fixed: Bools | None = None) -> Allocation:
    """Shorten lifetimes and take smaller precisions until nothing exceeds the capacity.

    Greedy: take the change with the least added error per freed token and step, counting only steps and tokens over
    capacity.

    Args:
        problem: what is to be allocated.
        holding: what is wanted.
        fixed: blocks that stay what they are, bool [T, K - 1]; None where any may change.

    Returns:
        What fits.

    Raises:
        ValueError: what must stay exceeds the capacity.
    """
    until, precision = (part.copy() for part in holding)
    holding = Allocation(until, precision)
    while (excess := count_held(problem, holding) - problem.capacity).max() > 0:
        added = find_changes(problem, holding)
        if fixed is not None:
            added[fixed] = np.inf
        freed = _sum_freed(problem, holding, excess)
        worth = np.full(added.shape, np.inf)
        np.divide(added, freed, out=worth, where=freed > 0)
        if np.isinf(worth.min()):
            raise ValueError("the forced sources alone exceed the capacity")
        for head, source, end, small in _best_of_each_head(worth):
            less = -_occupy_more(problem, holding, head, source, end, small)
            # Others have freed some of it meanwhile: what is worth less than half is judged anew.
            if 2 * np.minimum(excess.clip(0), less).sum() >= freed[head, source, end, small]:
                until[head, source], precision[head, source] = end, small
                excess -= less
    return holding


def lengthen(problem: Problem, holding: Allocation) -> Allocation:
    """Lengthen lifetimes and take larger precisions until no change fits that does no harm.

    Greedy: take the change that saves the most error per added token and step.

    Args:
        problem: what is to be allocated.
        holding: what fits.

    Returns:
        What fits.
    """
    until, precision = (part.copy() for part in holding)
    holding = Allocation(until, precision)
    free = problem.capacity - count_held(problem, holding)
    while True:
        added = find_changes(problem, holding)
        more = _sum_more(problem, holding)
        fits = (more > 0) & (added <= 0) & _find_fitting(problem, holding, free)
        if not fits.any():
            return holding
        worth = np.full(added.shape, np.inf)
        np.divide(added, more, out=worth, where=fits)
        for head, source, end, large in _best_of_each_head(worth):
            left = free - _occupy_more(problem, holding, head, source, end, large)
            if left.min() >= 0:
                until[head, source], precision[head, source] = end, large
                free = left


def find_changes(problem: Problem, holding: Allocation) -> Floats:
    """Return the change in a head's error for every other lifetime and precision, float64 [T, K - 1, K, F].

    Entry [h, i, d, f] is for source i of head h, lifetime d and precision f; infinite where that cannot be.
    """
    until, precision = holding
    (heads, sources), count = until.shape, problem.segments
    sets, every = find_sets(problem, until), np.arange(heads)
    grown = np.full((heads, sources, count), np.inf)
    grown[:, : problem.forced, -1] = 0
    for source in range(problem.forced, sources):
        gained = np.zeros((count, heads))  # by holding the source rather than not, at each consumer
        for k in range(source + 1, count):
            if source in problem.sources[k]:
                bit, errors = 1 << problem.sources[k].index(source), problem.errors[k]
                gained[k] = errors[sets[k] | bit, every] - errors[sets[k] & ~bit, every]
        total = gained.cumsum(0)
        ends = np.arange(source, count) if problem.lifetimes else np.array([source, count - 1])
        grown[:, source, ends] = (total[ends] - total[until[:, source], every]).T
    now = problem.noise[np.arange(sources), precision, until, every[:, None]]
    return grown[..., None] + (problem.noise.transpose(3, 0, 2, 1) - now[..., None, None])


def _occupy_more(
    problem: Problem, holding: Allocation, head: int, source: int, end: int, precision: int
) -> Ints:
    """Return the memory that a source adds at each instant with another lifetime and precision, int64 [K (L + 1)]."""
    leaving, more = problem.leaving[:, problem.layer[head]], np.zeros_like(problem.capacity)
    now = problem.sizes[source, holding.precision[head, source]]
    more[leaving[source] : leaving[end]] += problem.sizes[source, precision]
    more[leaving[source] : leaving[holding.until[head, source]]] -= now
    return more


def _sum_more(problem: Problem, holding: Allocation) -> Ints:
    """Return how much more capacity, summed over time, another lifetime and precision takes, int64 [T, K - 1, K, F]."""
    until, precision = holding
    sources, entering = np.arange(until.shape[1]), problem.leaving[:-1, problem.layer].T
    now = problem.sizes[sources, precision] * (problem.leaving[until, problem.layer[:, None]] - entering)
    lived = problem.leaving.T[problem.layer][:, None] - entering[..., None]
    return problem.sizes[:, None] * lived[..., None] - now[..., None, None]


def _sum_freed(problem: Problem, holding: Allocation, excess: Ints) -> Ints:
    """Return the memory x time that each shorter lifetime and lower precision frees, int64 [T, K - 1, K, F].

    Args:
        problem: what is to be allocated.
        holding: what is held.
        excess: what is held above the capacity at each instant: more than that does not count.

    Returns:
        0 for what frees nothing, or is longer or larger.
    """
    (until, precision), layer = holding, problem.layer[:, None]
    sizes, sources = problem.sizes, np.arange(until.shape[1])
    smaller = (sizes[:, :, None] - sizes[:, None]).clip(0)

    def pass_time(freed: Ints) -> Ints:
        """Sum what counts of freed capacity [...] up to each instant, int64 [..., K (L + 1) + 1]."""
        counted = excess.clip(0, freed[..., None])
        return np.pad(counted.cumsum(-1), [*[(0, 0)] * freed.ndim, (1, 0)])

    dropped, saved = pass_time(sizes), pass_time(smaller)
    ends, begin = problem.leaving.T[layer], problem.leaving[sources, layer]
    of_block = (sources[:, None], precision[..., None])
    freed = dropped[*of_block, problem.leaving[until, layer][..., None]] - dropped[*of_block, ends]
    passed = saved.swapaxes(2, 3)
    freed = freed[..., None] + passed[*of_block, ends] - passed[*of_block, begin[..., None]]
    longer = np.arange(problem.segments) > until[..., None]
    larger = sizes > sizes[sources, precision][..., None]
    freed[longer[..., None] | larger[:, :, None]] = 0
    return freed


def _find_fitting(problem: Problem, holding: Allocation, free: Ints) -> Bools:
    """Return which other lifetimes and precisions fit, bool [T, K - 1, K, F]."""
    (until, precision), layer = holding, problem.layer[:, None, None]
    count, leaving, sources = problem.segments, problem.leaving, np.arange(until.shape[1])
    smallest = np.full((count, problem.layers), A_LOT)
    for k in range(1, count):
        for c in range(problem.layers):
            smallest[k, c] = free[leaving[k - 1, c] : leaving[k, c]].min()
    between = np.full((problem.layers, count, count), A_LOT)
    for k in range(count - 1):
        between[:, k, k + 1 :] = np.minimum.accumulate(smallest[k + 1 :]).T
    now, ends = until[..., None], np.arange(count)
    common = between[layer, sources[:, None], np.minimum(now, ends)]
    larger = problem.sizes - problem.sizes[sources, precision][..., None]
    return (larger[:, :, None] <= common[..., None]) & (
        problem.sizes[:, None] <= between[layer, now, ends][..., None]
    )


def _best_of_each_head(worth: Floats) -> list[tuple[int, int, int, int]]:
    """Return (head, source, lifetime, precision) of the least worth of every head that has any, least first.

    Those that change nothing wait until nothing else is left.
    """
    flat = worth.reshape(len(worth), -1)
    best = flat.argmin(1)
    smallest = flat[np.arange(len(flat)), best]
    heads = smallest.argsort(kind="stable")
    heads = heads[smallest[heads] < (0 if smallest.min() < 0 else np.inf)]
    changes = np.unravel_index(best[heads], worth.shape[1:])
    return list(zip(heads.tolist(), *(part.tolist() for part in changes), strict=True))
