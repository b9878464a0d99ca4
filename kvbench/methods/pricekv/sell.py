"""Sale of capacity to heads, segment after segment, by what their errors save per token."""

from itertools import pairwise

import numpy as np
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec
from kvbench.methods.pricekv.curves import list_capacities
from kvbench.methods.shared.capacities import Floats, Ints, fill_gaps, shrink_early
from kvbench.methods.shared.select import USUAL_WINDOW


def allocate_capacities(
    errors: Floats, capacities: Ints, spec: ModelSpec, total: int, *, floor: int, decay: float
) -> Ints:
    """Return the tokens that each head holds after each cached segment, int64 [K - 1, T].

    What a capacity is worth while segment k runs is its error at k and, by `decay` less each time, at all later ones:
    G_k = e_k + decay x G_{k+1}, linear between the capacities that were measured. Where all that heads have fits, they
    keep it; else B is sold anew after every segment. So that no instant in between exceeds B, deep heads that are to
    shrink do so early where shallow ones grow.

    Args:
        errors: float64 [K - 1, T, capacities], of each segment but the first.
        capacities: int64 [capacities], in rising order.
        spec: the model.
        total: B, in whole tokens.
        floor: tokens that every head holds at least, once it has seen so many; at most B / T.
        decay: see above.
    """
    worth = errors.copy()
    for k in range(len(worth) - 2, -1, -1):
        worth[k] += decay * worth[k + 1]
    worth = np.minimum.accumulate(worth, -1)
    held, before = [], np.zeros(spec.all_heads, np.int64)
    for k, length in enumerate(spec.lengths[:-1]):
        reach = before + length
        before = reach if reach.sum() <= total else sell(worth[k], capacities, reach, total, floor)
        held.append(before)
    fitting = shrink_early(np.array(held), spec.lengths, total, spec.heads)
    return fill_gaps(fitting, spec.lengths, total, spec.heads)


def sell_by_curves(error: Tensor, spec: ModelSpec, budget: Budget, *, floor: int, decay: float) -> Ints:
    """Return the tokens that each head holds after each cached segment, int64 [K - 1, L, H].

    Args:
        error: float64 [L, H, K - 1, capacities] at `curves.list_capacities`, of each segment but the first; of a text
            [L, H, 1, capacities], one curve for all segments.
        spec: the model.
        budget: B.
        floor: tokens that every head holds at least, or B / T if that is less.
        decay: what a later segment counts in the worth of a capacity beside the one before it.
    """
    by_segment = error.expand(-1, -1, len(spec.segments) - 1, -1).flatten(0, 1).transpose(0, 1)
    return allocate_capacities(
        by_segment.numpy(),
        np.array(list_capacities(spec)),
        spec,
        budget.tokens,
        floor=min(floor, budget.head_tokens),
        decay=decay,
    ).reshape(-1, spec.layers, spec.heads)


def choose_floor(spec: ModelSpec, budget: Budget) -> int:
    """Return the tokens that every head should hold at least.

    Calibrated errors are means, under which some heads hold too little for single images: those of a next-token model
    hold the condition and a row, or three fifths of B / T where those are more. In texts, whose prompt may be longer
    than B / T, there are heads that look at the newest tokens alone, and 16 are enough.
    """
    if spec.family == "next-scale":
        return 1
    if spec.writes_text:
        return USUAL_WINDOW
    return max(spec.lengths[0] + max(spec.lengths[1:]), 3 * budget.head_tokens // 5)


def sell(worth: Floats, capacities: Ints, reach: Ints, total: int, floor: int) -> Ints:
    """Sell tokens to heads in the order of error saved per token; returns int64 [T], which uses all of them.

    Offers are the edges of each head's lower convex hull, so that no head pays more for a later token; the last one is
    sold in part. What nobody pays for goes to those that lack most.

    Args:
        worth: float64 [T, capacities], the error at each capacity, which never rises.
        capacities: int64 [capacities], in rising order.
        reach: int64 [T], the most that each head can hold; more than `total` together.
        total: tokens.
        floor: tokens that every head gets that can hold them.
    """
    held = np.minimum(floor, reach)
    offers = []
    for head, (least, most) in enumerate(zip(held.tolist(), reach.tolist(), strict=True)):
        between = capacities[(capacities > least) & (capacities < most)]
        tokens = np.array(sorted({least, *between.tolist(), most}))
        hull = find_hull(tokens, np.interp(tokens, capacities, worth[head]))
        offers += [((y - z) / (b - a), head, b - a) for (a, y), (b, z) in pairwise(hull) if z < y]
    left = total - int(held.sum())
    for _, head, tokens_more in sorted(offers, key=lambda offer: -offer[0]):
        taken = min(tokens_more, left)
        held[head] += taken
        left -= taken
    for head in (held - reach).argsort(kind="stable"):
        taken = min(int(reach[head] - held[head]), left)
        held[head] += taken
        left -= taken
    return held


def find_hull(x: Ints, y: Floats) -> list[tuple[int, float]]:
    """Return the corners of the lower convex hull of points in rising order of x.

    >>> find_hull(np.array([0, 1, 2, 4]), np.array([4.0, 3.0, 1.0, 0.0]))
    [(0, 4.0), (2, 1.0), (4, 0.0)]
    """
    hull: list[tuple[int, float]] = []
    for point in zip(x.tolist(), y.tolist(), strict=True):
        while len(hull) > 1 and not _turns_up(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _turns_up(a: tuple[int, float], b: tuple[int, float], c: tuple[int, float]) -> bool:
    return (b[1] - a[1]) * (c[0] - b[0]) < (c[1] - b[1]) * (b[0] - a[0])
