"""Greedy allocation of capacities to heads by marginal gain, segment after segment."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec
from kvbench.methods.shared.capacities import Floats, Ints, fill_gaps, shrink_early
from kvbench.methods.shared.select import USUAL_WINDOW


def allocate_calibrated(
    error: Tensor,
    measured: Sequence[int],
    spec: ModelSpec,
    budget: Budget,
    *,
    floor: int | Ints,
    decay: float,
) -> Ints:
    """Return the capacity of each head after each cached segment, int64 [K - 1, L, H].

    Args:
        error: float64 [L, H, K - 1, capacities], for each segment but the first; for texts [L, H, 1, capacities], one
            curve for all segments.
        measured: the capacities at which it was measured (`full_scores.list_capacities`).
        spec: the model.
        budget: the capacity B.
        floor: minimum capacity of a head, or of each head, int64 [L x H]; in sum at most B.
        decay: see `allocate_capacities`.
    """
    by_segment = error.expand(-1, -1, len(spec.segments) - 1, -1).flatten(0, 1).transpose(0, 1)
    capacities = np.array(measured)
    amounts = allocate_capacities(
        by_segment.numpy(), capacities, spec, budget.tokens, floor=floor, decay=decay
    )
    return amounts.reshape(-1, spec.layers, spec.heads)


def allocate_capacities(
    errors: Floats, capacities: Ints, spec: ModelSpec, total: int, *, floor: int | Ints, decay: float
) -> Ints:
    """Return the capacity of each head after each cached segment, int64 [K - 1, T].

    The cost of a capacity at segment k is G_k = e_k + decay x G_{k+1}, the discounted error at k and all later
    segments, interpolated linearly between the calibrated capacities. While the full cache fits, heads keep all tokens;
    otherwise B is allocated anew after every segment. Deep heads that will shrink do so early where shallow heads grow,
    so that B is not exceeded between layers.

    Args:
        errors: float64 [K - 1, T, capacities] for each segment but the first.
        capacities: int64 [capacities], in rising order.
        spec: the model.
        total: B in whole tokens.
        floor: minimum capacity of a head that has seen this number of tokens, or of each head; in sum at most B.
        decay: discount of the error per segment.
    """
    costs = errors.copy()
    for k in range(len(costs) - 2, -1, -1):
        costs[k] += decay * costs[k + 1]
    costs = np.minimum.accumulate(costs, -1)
    amounts, before = [], np.zeros(spec.all_heads, np.int64)
    for k, length in enumerate(spec.lengths[:-1]):
        limits = before + length
        fits = limits.sum() <= total
        before = limits if fits else allocate_by_gain(costs[k], capacities, limits, total, floor)
        amounts.append(before)
    strict = shrink_early(np.array(amounts), spec.lengths, total, spec.heads)
    return fill_gaps(strict, spec.lengths, total, spec.heads)


def choose_floor(spec: ModelSpec, budget: Budget) -> int:
    """Return the default minimum capacity of a head.

    Calibrated errors are means, and a capacity that is enough on average is too small for some images. In next-token
    image models heads therefore hold at least the condition and one row, or 3/5 of B / T if that is larger. In texts,
    whose prompt may exceed B / T, 16 tokens are enough for heads that attend to the newest tokens only.
    """
    if spec.family == "next-scale":
        return 1
    if spec.writes_text:
        return USUAL_WINDOW
    return max(spec.lengths[0] + max(spec.lengths[1:]), 3 * budget.head_tokens // 5)


def allocate_by_gain(costs: Floats, capacities: Ints, limits: Ints, total: int, floor: int | Ints) -> Ints:
    """Allocate tokens to heads in the order of error saved per token; returns int64 [T] with sum `total`.

    Increments are the edges of each head's lower convex hull, so that gains per token never rise with the capacity; the
    last increment may be partial. Capacity without positive gain goes to the heads furthest below their limit.

    Args:
        costs: float64 [T, capacities], error at each capacity; never rises.
        capacities: int64 [capacities], in rising order.
        limits: int64 [T], maximum capacity of each head; their sum exceeds `total`.
        total: number of tokens.
        floor: minimum capacity of a head, or of each head, limited to its maximum.
    """
    amounts = np.minimum(floor, limits)
    increments = []
    for head, (low, high) in enumerate(zip(amounts.tolist(), limits.tolist(), strict=True)):
        inner = capacities[(capacities > low) & (capacities < high)]
        tokens = np.array(sorted({low, *inner.tolist(), high}))
        hull = find_hull(tokens, np.interp(tokens, capacities, costs[head]))
        increments += [((y - z) / (b - a), head, b - a) for (a, y), (b, z) in pairwise(hull) if z < y]
    remaining = total - int(amounts.sum())
    for _, head, increment in sorted(increments, key=lambda entry: -entry[0]):
        grant = min(increment, remaining)
        amounts[head] += grant
        remaining -= grant
    for head in (amounts - limits).argsort(kind="stable"):
        grant = min(int(limits[head] - amounts[head]), remaining)
        amounts[head] += grant
        remaining -= grant
    return amounts


def find_hull(x: Ints, y: Floats) -> list[tuple[int, float]]:
    """Return the corners of the lower convex hull of points in rising order of x.

    >>> find_hull(np.array([0, 1, 2, 4]), np.array([4.0, 3.0, 1.0, 0.0]))
    [(0, 4.0), (2, 1.0), (4, 0.0)]
    """
    hull: list[tuple[int, float]] = []
    for c in zip(x.tolist(), y.tolist(), strict=True):
        while len(hull) > 1:
            a, b = hull[-2:]
            if (b[1] - a[1]) * (c[0] - b[0]) < (c[1] - b[1]) * (b[0] - a[0]):
                break
            hull.pop()
        hull.append(c)
    return hull
