"""Lifetimes changed one at a time: shortened until everything fits, lengthened as long as anything does."""

import numpy as np

from kvbench.methods.pricekv.problem import Floats, Ints, Problem, count_held, find_sets


def shorten(problem: Problem, until: Ints, *, lifetimes: bool = True) -> Ints:
    """Shorten lifetimes until nothing exceeds the capacity, where least error is added per token and time freed.

    Time counts where too much is held, tokens as far as they are too many.

    Args:
        problem: what is to be allocated.
        until: lifetimes int64 [T, K - 1].
        lifetimes: sources may be dropped before the end; otherwise they are not held at all.

    Returns:
        Lifetimes int64 [T, K - 1].

    Raises:
        ValueError: the forced sources exceed the capacity.
    """
    until = until.copy()
    while (excess := count_held(problem, until) - problem.capacity).max() > 0:
        added = find_changes(problem, until, lifetimes=lifetimes)
        freed = _sum_times(problem, until, excess)
        worth = np.full(added.shape, np.inf)
        np.divide(added, freed, out=worth, where=freed > 0)
        if np.isinf(worth.min()):
            raise ValueError("the forced sources alone exceed the capacity")
        for head, source, end in _best_of_each_head(worth):
            span = _span(problem, head, end, until[head, source])
            length = problem.lengths[source]
            # Others have freed some of it meanwhile: what is worth less than half is judged anew.
            if 2 * excess[span].clip(0, length).sum() >= freed[head, source, end]:
                until[head, source] = end
                excess[span] -= length
    return until


def lengthen(problem: Problem, until: Ints, *, lifetimes: bool = True) -> Ints:
    """Lengthen lifetimes, where most error is saved per token and time first, until nothing fits that does no harm.

    Args:
        problem: what is to be allocated.
        until: lifetimes int64 [T, K - 1] that fit.
        lifetimes: sources may be dropped before the end; otherwise they are held to the end.

    Returns:
        Lifetimes int64 [T, K - 1] that fit.
    """
    until = until.copy()
    room = problem.capacity - count_held(problem, until)
    lengths = np.array(problem.lengths[:-1])[:, None]
    while True:
        added = find_changes(problem, until, lifetimes=lifetimes)
        time = _sum_times(problem, until, None)
        fits = (time < 0) & (lengths <= _find_room(problem, until, room)) & (added <= 0)
        if not fits.any():
            return until
        worth = np.full(added.shape, np.inf)
        np.divide(added, -time * lengths, out=worth, where=fits)
        for head, source, end in _best_of_each_head(worth):
            span = _span(problem, head, until[head, source], end)
            if room[span].min() >= problem.lengths[source]:
                until[head, source] = end
                room[span] -= problem.lengths[source]


def find_changes(problem: Problem, until: Ints, *, lifetimes: bool = True) -> Floats:
    """Return how much the error of a head grows if one lifetime alone becomes another, float64 [T, K - 1, K].

    Entry [h, i, d] is for source i of head h and lifetime d; infinite where that cannot be.
    """
    (heads, sources), count = until.shape, problem.segments
    sets, every = find_sets(problem, until), np.arange(heads)
    grown = np.full((heads, sources, count), np.inf)
    for source in range(problem.forced, sources):
        gained = np.zeros((count, heads))  # by holding the source rather than not, at each consumer
        for k in range(source + 1, count):
            if source in problem.sources[k]:
                bit, errors = 1 << problem.sources[k].index(source), problem.errors[k]
                gained[k] = errors[sets[k] | bit, every] - errors[sets[k] & ~bit, every]
        total = gained.cumsum(0)
        ends = np.arange(source, count) if lifetimes else np.array([source, count - 1])
        grown[:, source, ends] = (total[ends] - total[until[:, source], every]).T
    return grown


def _sum_times(problem: Problem, until: Ints, excess: Ints | None) -> Ints:
    """Return how much time each lifetime would free by becoming another, int64 [T, K - 1, K]; negative if longer.

    Args:
        problem: what is to be allocated.
        until: lifetimes int64 [T, K - 1].
        excess: what is held above the capacity at each instant, by which it counts, up to a source's tokens; None
            counts each instant once.
    """
    now = problem.leaving[until, problem.layer[:, None]]
    then = problem.leaving.T[problem.layer][:, None]
    if excess is None:
        return now[..., None] - then
    tokens = np.array(problem.lengths[:-1])[:, None]
    passed = np.pad(excess.clip(0, tokens).cumsum(1), ((0, 0), (1, 0)))
    sources = np.arange(len(tokens))
    return passed[sources, now][..., None] - passed[sources[:, None], then]


def _find_room(problem: Problem, until: Ints, room: Ints) -> Ints:
    """Return the least room from the end of each lifetime to another, int64 [T, K - 1, K]; a lot if not longer."""
    least = np.full((problem.segments, problem.layers), np.iinfo(np.int64).max)
    for k in range(1, problem.segments):
        for layer in range(problem.layers):
            least[k, layer] = room[problem.leaving[k - 1, layer] : problem.leaving[k, layer]].min()
    longer = np.arange(problem.segments) > until[..., None]
    of_heads = least.T[problem.layer][:, None]
    return np.minimum.accumulate(np.where(longer, of_heads, np.iinfo(np.int64).max), -1)


def _best_of_each_head(worth: Floats) -> list[tuple[int, int, int]]:
    """Return (head, source, lifetime) of the least worth of every head that has any, least first.

    Those that change nothing wait until nothing else is left.
    """
    flat = worth.reshape(len(worth), -1)
    best = flat.argmin(1)
    least = flat[np.arange(len(flat)), best]
    heads = least.argsort(kind="stable")
    heads = heads[least[heads] < (0 if least.min() < 0 else np.inf)]
    sources, ends = np.divmod(best[heads], worth.shape[2])
    return list(zip(heads.tolist(), sources.tolist(), ends.tolist(), strict=True))


def _span(problem: Problem, head: int, first: int, last: int) -> slice:
    """Return the instants between the end of one lifetime and that of another."""
    layer = problem.layer[head]
    return slice(problem.leaving[first, layer], problem.leaving[last, layer])
