"""Allocation of a budget to all heads: builds the problem from calibrated errors and solves it."""

from collections.abc import Sequence
from dataclasses import replace
from math import floor
from typing import Literal

import numpy as np
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec
from kvbench.methods.pricekv.local_search import exchange, lengthen, shorten
from kvbench.methods.pricekv.noise import count_bits
from kvbench.methods.pricekv.prices import find_prices, minimize_lagrangian
from kvbench.methods.pricekv.problem import Allocation, Problem, Sources, make_zero_noise, measure_usage
from kvbench.methods.shared.precision import Precision, find_stored_bits

Weights = Literal["inverse_tokens", "uniform", "tokens"]


def build_problem(
    error: Tensor, spec: ModelSpec, budget: Budget, sources: Sources, *, weights: Weights, forced: int
) -> Problem:
    """Return the problem of calibrated errors and a budget, with one precision and capacity in tokens.

    `error` is float64 [L, H, sets] from `errors.SubsetError`; the weight of a target of t tokens is 1/t, 1 or t.
    """
    flat = error.reshape(spec.all_heads, -1).numpy()
    errors, start = [np.zeros((1, spec.all_heads))], 0
    for k, length in enumerate(spec.lengths[1:], start=1):
        count = 1 << len(sources[k])
        of_sets = weigh_error(length, weights) * flat[:, start : start + count].T
        if len(sources[k]) == k:
            of_sets[-1] = 0  # the set of all sources has no error
        required = sum(1 << bit for bit, source in enumerate(sources[k]) if source < forced)
        of_sets[np.arange(count) & required != required] = np.inf
        errors.append(np.ascontiguousarray(of_sets))
        start += count
    capacity = np.full(len(spec.segments) * (spec.layers + 1), budget.tokens)
    sizes = np.array(spec.lengths[:-1])[:, None]
    noise = make_zero_noise(len(sources), spec.all_heads)
    return Problem(tuple(errors), sources, sizes, noise, spec.layers, capacity, forced)


def add_precisions(
    problem: Problem,
    noise: Tensor,
    precisions: Sequence[Precision],
    spec: ModelSpec,
    budget: Budget,
    weights: Weights,
) -> Problem:
    """Return a problem of `build_problem` with precisions, largest first, and capacity in bytes of all branches.

    `noise` is float64 [L, H, K - 1, F, K] from `noise.PrecisionError`.
    """
    assert budget.bytes is not None, "a menu needs a budget in bytes"
    bits = [
        [count_bits(p._replace(bits=find_stored_bits(p.bits, length)), spec.branches) for p in precisions]
        for length in spec.lengths[:-1]
    ]
    weighted = noise.flatten(0, 1).numpy() * [weigh_error(length, weights) for length in spec.lengths]
    return replace(
        problem,
        sizes=problem.sizes * (2 * spec.head_dim * np.array(bits) // 8),
        noise=np.ascontiguousarray(weighted.transpose(1, 2, 3, 0).cumsum(2)),
        capacity=np.full_like(problem.capacity, floor(spec.branches * budget.bytes)),
    )


def weigh_error(length: int, weights: Weights) -> float:
    """Return the weight of the error at a target of `length` tokens."""
    return {"inverse_tokens": 1 / max(length, 1), "uniform": 1, "tokens": length}[weights]


def allocate(problem: Problem) -> Allocation:
    """Find a feasible allocation to which no harmless block can be added.

    Each head minimises its Lagrangian exactly at common prices. Local search then makes the result feasible, fills the
    free capacity and exchanges blocks.
    """
    full = problem.full_allocation()
    if (measure_usage(problem, full) <= problem.capacity).all():
        return full
    prices = find_prices(problem)
    optimum = minimize_lagrangian(problem, prices)
    optimum.until[:, : problem.forced] = problem.segments - 1
    feasible = lengthen(problem, shorten(problem, optimum))
    return exchange(problem, feasible, prices)
