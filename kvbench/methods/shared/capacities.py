"""Capacities of layers that grow and shrink from scale to scale, without exceeding a total after any layer."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def shrink_early(capacity: Ints, arriving: Sequence[int], total: int, heads: int = 1) -> Ints:
    """Lower capacities so that `total` is never exceeded while layers grow and shrink; int64 [K - 1, L x heads].

    While scale k runs, layers up to l have their new capacity and the others their old one. If the sum exceeds `total`,
    the deepest layers that will shrink do so after scale k - 1 already, only as far as needed.

    Args:
        capacity: int64 [K - 1, L x heads], layer by layer, at most `total` in each row.
        arriving: new tokens of each column at each scale.
        total: tokens that all layers may hold together.
        heads: columns of a layer, which change at the same time.
    """
    held, columns = capacity.copy(), capacity.shape[1]
    before = np.minimum(held[0], arriving[0])
    for k in range(1, len(held)):
        after = np.minimum(held[k], before + arriving[k])
        for end in range(heads, columns, heads):
            excess = int(after[:end].sum() + before[end:].sum()) - total
            spare = np.maximum(before[end:] - after[end:], 0)
            from_deeper = spare[::-1].cumsum()[::-1] - spare
            given = (excess - from_deeper).clip(0, spare)
            before[end:] -= given
            held[k - 1, end:] = np.where(given > 0, before[end:], held[k - 1, end:])
        before = after
    return held


def fill_gaps(held: Ints, arriving: Sequence[int], total: int, heads: int = 1) -> Ints:
    """Lend capacity freed by early shrinking to layers that release it before it is needed: int64 [K - 1, L x heads].

    Shallow layers may hold more after a scale, and shrink at the next one before a deeper layer grows. A layer takes at
    most its tokens and the free capacity at each moment of both scales; its first columns take first.

    Args:
        held: int64 [K - 1, L x heads], never above `total` at any moment, and at most the tokens of a column.
        arriving: new tokens of each column at each scale.
        total: tokens that all layers may hold together.
        heads: columns of a layer, which change at the same time.
    """
    held, columns = held.copy(), held.shape[1]
    before = np.zeros(columns, np.int64)
    for k in range(len(held)):
        after = held[k + 1] if k + 1 < len(held) else held[k]
        for begin in range(0, columns, heads):
            end = begin + heads
            # While this scale runs, from this layer on; while the next one does, up to the layer before.
            now = (held[k].cumsum() + before.sum() - before.cumsum())[end - 1 :: heads]
            moved = (after - held[k]).cumsum()[heads - 1 : begin : heads]
            later = held[k].sum() + np.concatenate(([0], moved))
            spare = total - max(int(now.max()), int(later.max()))
            missing = before[begin:end] + arriving[k] - held[k, begin:end]
            held[k, begin:end] += (spare - (missing.cumsum() - missing)).clip(0, missing)
        before = held[k]
    return held


def fill_groups(tokens: int, weights: Floats, sizes: Ints, reach: Ints, min_tokens: int = 1) -> Ints:
    """Share tokens in proportion to weights, between bounds on each head: int64 [groups], per head.

    Tokens above a head's bound are shared among the others (water-filling). Shares are rounded down, and the remainder
    goes to whole groups that it suffices for, in order of their fractions.

    Args:
        tokens: tokens of all heads together, enough for the lower bounds.
        weights: [groups], positive.
        sizes: heads of each group.
        reach: upper bound of a head of each group.
        min_tokens: lower bound of each head, if `reach` permits.
    """
    floor = np.minimum(min_tokens, reach)
    levels = np.sort(np.concatenate((floor / weights, reach / weights)))
    held = np.clip(levels[:, None] * weights, floor, reach) @ sizes
    shares = np.clip(np.interp(tokens, held, levels) * weights, floor, reach)
    whole = np.floor(shares + 1e-9).astype(np.int64)  # rounding must not lower a whole number
    spare = tokens - int(whole @ sizes)
    for group in np.argsort(whole - shares, kind="stable"):
        if whole[group] < reach[group] and sizes[group] <= spare:
            whole[group] += 1
            spare -= int(sizes[group])
    return whole
