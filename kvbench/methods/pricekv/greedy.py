"""Greedy allocation of capacities to heads by marginal gain, segment after segment."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec
from kvbench.methods.shared.capacities import Floats, Ints, allocate_anew
from kvbench.methods.shared.select import DEFAULT_WINDOW


def allocate_calibrated(
    error: Tensor,
    measured: Sequence[int],
    spec: ModelSpec,
    budget: Budget,
    *,
    floor: int | Ints,
    decay: float,
) -> Ints:
    """Return the capacity of each head after each cached segment, int64 [K - 1, L, H] (`capacities.allocate_anew`).

    The cost of a capacity at segment k is G_k = e_k + decay x G_{k+1}, the discounted error at k and all later
    segments. It is interpolated linearly between the capacities `measured`, in rising order. The error e is float64
    [L, H, K - 1, capacities], for each segment except the first, or [L, H, 1, capacities] for all segments. Once a head
    has seen `floor` tokens, an int or int64 [T], it holds at least these; the sum of floors is at most B.
    """
    costs = error.expand(-1, -1, len(spec.segments) - 1, -1).flatten(0, 1).transpose(0, 1).numpy().copy()
    for k in range(len(costs) - 2, -1, -1):
        costs[k] += decay * costs[k + 1]
    costs, capacities = np.minimum.accumulate(costs, -1), np.array(measured)

    def allocate(k: int, reach: Ints) -> Ints:
        return allocate_by_gain(costs[k], capacities, reach, budget.tokens, floor)

    return allocate_anew(spec, budget.tokens, allocate)


def choose_floor(spec: ModelSpec, budget: Budget) -> int:
    """Return the default minimum capacity of a head.

    Calibrated errors are means, and a capacity that is enough on average is too small for some images. In next-token
    image models heads therefore hold at least the condition and one row, or 3/5 of B / T if that is larger. In texts,
    whose prompt may exceed B / T, `DEFAULT_WINDOW` is enough for heads that attend to the newest tokens only.
    """
    if spec.family == "next-scale":
        return 1
    if spec.writes_text:
        return DEFAULT_WINDOW
    return max(spec.lengths[0] + max(spec.lengths[1:]), 3 * budget.head_tokens // 5)


def raise_floors(floor: int, retrieval: Tensor | None, share: float, spec: ModelSpec, budget: Budget) -> Ints:
    """Return the minimum capacity of each head, int64 [L x H]: the whole text in heads of highest retrieval score.

    The share `share` of B is for whole texts; other heads keep the minimum `floor`, at most B / T. Retrieval scores are
    float64 [L, H]; with None all heads have the minimum `floor`.
    """
    floors = np.full(spec.all_heads, floor)
    if retrieval is None:
        return floors
    whole, total = spec.cached_length, budget.tokens
    spare = (total - floor * spec.all_heads) // max(whole - floor, 1)
    count = min(int(share * total) // whole, spare)
    floors[torch.argsort(retrieval.flatten(), descending=True, stable=True)[:count].numpy()] = whole
    return floors


def allocate_by_gain(costs: Floats, capacities: Ints, limits: Ints, total: int, floor: int | Ints) -> Ints:
    """Allocate tokens to heads in the order of error saved per token; returns int64 [T] with sum `total`.

    Increments are the edges of each head's lower convex hull, so that gains per token never rise with the capacity; the
    last increment may be partial. Capacity without positive gain goes to the heads furthest below their limit.

    Args:
        costs: float64 [T, capacities], error of each head at each capacity, which never rises.
        capacities: int64 [capacities], in rising order.
        limits: int64 [T], maximum tokens of each head; their sum exceeds `total`.
        total: tokens of all heads.
        floor: minimum tokens of a head, an int or int64 [T], lowered to its limit.
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
