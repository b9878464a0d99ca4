"""Lifetimes of all sources in all heads that fit a budget, out of calibrated errors."""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from math import ceil, floor
from typing import Literal

import numpy as np
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec
from kvbench.core.storage import Precision, find_stored_bits
from kvbench.methods.pricekv.exchange import exchange
from kvbench.methods.pricekv.local_search import find_changes, lengthen, shorten
from kvbench.methods.pricekv.noise import count_bits
from kvbench.methods.pricekv.prices import choose, find_prices
from kvbench.methods.pricekv.problem import Allocation, Problem, be_noiseless, count_held
from kvbench.methods.pricekv.sources import Sources

Weights = Literal["inverse_tokens", "uniform", "tokens"]


def pose(
    error: Tensor, spec: ModelSpec, budget: Budget, sources: Sources, *, weights: Weights, forced: int
) -> Problem:
    """Pose the problem of a calibration and a budget.

    Args:
        error: float64 [L, H, sets] as `errors.SubsetError` leaves it.
        spec: the model.
        budget: the capacity B.
        sources: of each segment.
        weights: what the error at a consumer of t tokens counts: 1/t, 1 or t.
        forced: leading sources that all heads hold to the end.
    """
    flat = error.reshape(spec.all_heads, -1).numpy()
    errors, start = [np.zeros((1, spec.all_heads))], 0
    for k, length in enumerate(spec.lengths[1:], start=1):
        count = 1 << len(sources[k])
        of_sets = weigh(length, weights) * flat[:, start : start + count].T
        if len(sources[k]) == k:
            of_sets[-1] = 0  # nothing is missing
        must = sum(1 << bit for bit, source in enumerate(sources[k]) if source < forced)
        of_sets[np.arange(count) & must != must] = np.inf
        errors.append(np.ascontiguousarray(of_sets))
        start += count
    capacity = np.full(len(spec.segments) * (spec.layers + 1), budget.tokens)
    sizes = np.array(spec.lengths[:-1])[:, None]
    noise = be_noiseless(len(sources), spec.all_heads)
    return Problem(tuple(errors), sources, sizes, noise, spec.layers, capacity, forced)


def offer(
    problem: Problem,
    noise: Tensor,
    precisions: Sequence[Precision],
    spec: ModelSpec,
    budget: Budget,
    weights: Weights,
) -> Problem:
    """Offer a menu of precisions in a problem posed without one; capacity counts bytes of all branches of a prompt.

    Args:
        problem: as `pose` returns it.
        noise: float64 [L, H, K - 1, F, K] as `noise.PrecisionError` leaves it.
        precisions: the menu, the largest first.
        spec: the model.
        budget: the capacity in bytes.
        weights: see `pose`.
    """
    assert budget.bytes is not None, "a menu is sold by bytes"
    weighted = noise.flatten(0, 1).numpy() * [weigh(length, weights) for length in spec.lengths]
    bits = [
        [count_bits(p._replace(bits=find_stored_bits(p.bits, length)), spec.branches) for p in precisions]
        for length in spec.lengths[:-1]
    ]
    capacity = np.full_like(problem.capacity, floor(spec.branches * budget.bytes))
    return replace(
        problem,
        sizes=problem.sizes * (2 * spec.head_dim * np.array(bits) // 8),
        noise=np.ascontiguousarray(weighted.transpose(1, 2, 3, 0).cumsum(2)),
        capacity=capacity,
    )


def weigh(length: int, weights: Weights) -> float:
    """Return what the error at a consumer of so many tokens counts."""
    return {"inverse_tokens": 1 / length, "uniform": 1, "tokens": length}[weights]


def allocate(problem: Problem) -> Allocation:
    """Allocate by prices: what fits at every instant and leaves no capacity that could be used.

    Each head chooses for itself at common prices, exactly (`prices.choose`); what then is too much is shortened, what
    capacity is left is filled, and blocks are exchanged where that lowers the error.

    Args:
        problem: what is to be allocated.
    """
    everything = problem.hold_everything()
    if (count_held(problem, everything) <= problem.capacity).all():
        return everything
    prices = find_prices(problem)
    wanted = choose(problem, prices)
    wanted.until[:, : problem.forced] = problem.segments - 1
    fitting = lengthen(problem, shorten(problem, wanted))
    return exchange(problem, fitting, prices)


def allocate_counts(problem: Problem, spec: ModelSpec, budget: Budget) -> Allocation:
    """Allocate by HeatKV's counts (arXiv:2605.14877, Eq. 5): of every source equally many heads lose it at a time.

    Those lose it first that would miss it least, every other source held; what is too much in between is shortened.

    Args:
        problem: what is to be allocated, in one precision.
        spec: the model.
        budget: the capacity B.
    """
    holding, last = problem.hold_everything(), problem.segments - 1
    forced, ends = spec.leading_tokens(problem.forced), spec.ends
    missed = find_changes(problem, holding)[..., 0]
    for source in range(problem.forced, last):
        rank = missed[:, source, source].argsort(kind="stable").argsort(kind="stable")
        for k in range(last - 1, source - 1, -1):
            surplus = max(ends[k] - budget.per_head, Fraction(0))
            pruned = min(ceil(problem.heads * surplus / (ends[k] - forced)), problem.heads)
            holding.until[rank < pruned, source] = k
    return shorten(problem, holding)
