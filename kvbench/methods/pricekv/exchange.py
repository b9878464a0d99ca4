"""Exchange of blocks: one takes more capacity, others free it, and what remains is given to more of them."""

import numpy as np

from kvbench.methods.pricekv.local_search import find_changes, lengthen, shorten
from kvbench.methods.pricekv.problem import Allocation, Floats, Ints, Problem, count_held, sum_error

EFFORT = 30_000
"""Exchanges tried at most, times heads and precisions. Small models, whose blocks are large beside their capacity,
run out of promising ones before; large ones have little to gain."""


def exchange(problem: Problem, holding: Allocation, prices: Floats) -> Allocation:
    """Exchange blocks as long as that lowers the error.

    One lives longer or takes a larger precision, those whose loss adds least free capacity, and what remains
    goes where most is saved. Such are tried first that promise most: what is saved, less the price of the capacity that
    lacks.

    Args:
        problem: what is to be allocated.
        holding: what fits.
        prices: of capacity at each instant, float64 [K (L + 1)].

    Returns:
        What fits.
    """
    trials, improved = EFFORT // (problem.heads * problem.precisions), True
    while improved:
        best, improved = sum_error(problem, holding), False
        for change in _list_promising(problem, holding, prices, trials):
            trials -= 1
            changed = _change(problem, holding, change)
            if changed is not None and sum_error(problem, changed) < best:
                holding, improved = changed, True
                break
    return holding


def _list_promising(
    problem: Problem, holding: Allocation, prices: Floats, limit: int
) -> list[tuple[int, int, int, int]]:
    """Return (head, source, lifetime, precision) that save more error than the missing memory costs, best first."""
    free = problem.capacity - count_held(problem, holding)
    costs = find_changes(problem, holding)
    costs += _price_lacking(problem, holding, free, prices)
    promising = np.argwhere(costs < 0)
    order = costs[tuple(promising.T)].argsort(kind="stable")
    return [
        (head, source, end, precision) for head, source, end, precision in promising[order[:limit]].tolist()
    ]


def _price_lacking(problem: Problem, holding: Allocation, free: Ints, prices: Floats) -> Floats:
    """Return the price of the capacity that other lifetimes and precisions lack, [T, K - 1, K, F]."""
    (until, precision), layer = holding, problem.layer[:, None]
    sizes, sources = problem.sizes, np.arange(until.shape[1])

    def pass_time(taken: Ints) -> Floats:
        """Sum the lacking capacity [..., F] up to each instant, [..., K (L + 1) + 1, F]."""
        lacking = prices[:, None] * (taken[..., None, :] - free[:, None]).clip(0)
        return np.pad(lacking.cumsum(-2), [*[(0, 0)] * (taken.ndim - 1), (1, 0), (0, 0)])

    longer, larger = pass_time(sizes), pass_time(sizes[:, None] - sizes[:, :, None])
    leaving = problem.leaving
    begin, now, ends = leaving[sources, layer], leaving[until, layer], leaving.T[layer]
    common, last = np.minimum(now[..., None], ends), np.maximum(now[..., None], ends)
    of_block, column = (sources[:, None], precision[..., None]), sources[:, None]
    return (
        larger[*of_block, common]
        - larger[*of_block, begin[..., None]]
        + longer[column, last]
        - longer[column, now[..., None]]
    )


def _change(problem: Problem, holding: Allocation, change: tuple[int, int, int, int]) -> Allocation | None:
    """Change one block whatever it takes, then lengthen what fits; None if the others cannot free enough."""
    head, source, end, size = change
    until, precision = (part.copy() for part in holding)
    fixed = np.zeros(until.shape, bool)
    until[head, source], precision[head, source], fixed[head, source] = end, size, True
    try:
        fitting = shorten(problem, Allocation(until, precision), fixed)
    except ValueError:
        return None
    return lengthen(problem, fitting)
