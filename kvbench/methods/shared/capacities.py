"""Capacities of layers that grow and shrink from scale to scale, without exceeding a total after any layer."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def shrink_early(capacity: Ints, arriving: Sequence[int], total: int, heads: int = 1) -> Ints:
    """Lower capacities so far that no order of growing and shrinking layers exceeds `total`; int64 [K - 1, L x heads].

    While scale k runs, layers up to l hold what they may after it and the others what they held before. Where that is
    too much, the deepest layers that are to shrink do so right after scale k - 1, and only as far as needed.

    Args:
        capacity: int64 [K - 1, L x heads], layer by layer, at most `total` in each row.
        arriving: tokens that come to every column at each scale.
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
    """Give what early shrinking frees to layers that let go of it before it is needed: int64 [K - 1, L x heads].

    Shallow layers may hold more after a scale, and shrink at the next one before a deeper layer grows. A layer takes as
    much as it has tokens for and as no instant of either scale forbids; its first columns take first.

    Args:
        held: int64 [K - 1, L x heads], never above `total` in any order, and no more than a column can reach.
        arriving: tokens that come to every column at each scale.
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
            lacking = before[begin:end] + arriving[k] - held[k, begin:end]
            held[k, begin:end] += (spare - (lacking.cumsum() - lacking)).clip(0, lacking)
        before = held[k]
    return held


def fill_groups(tokens: int, weights: Floats, sizes: Ints, reach: Ints, min_tokens: int = 1) -> Ints:
    """Share tokens in proportion to weights, within what each head must and can hold: int64 [groups], per head.

    What some cannot hold is shared among the others (water-filling). Shares are rounded down, and what is left goes to
    whole groups, those of the largest fraction first, that it suffices for.

    Args:
        tokens: of all heads together, enough for what each must hold.
        weights: [groups], positive.
        sizes: heads of each group.
        reach: the most that a head of each group can hold.
        min_tokens: what every head holds that can.
    """
    floor = np.minimum(min_tokens, reach)
    levels = np.sort(np.concatenate((floor / weights, reach / weights)))
    held = np.clip(levels[:, None] * weights, floor, reach) @ sizes
    shares = np.clip(np.interp(tokens, held, levels) * weights, floor, reach)
    whole = np.floor(shares + 1e-9).astype(np.int64)  # what is whole but for rounding stays whole
    spare = tokens - int(whole @ sizes)
    for group in np.argsort(whole - shares, kind="stable"):
        if whole[group] < reach[group] and sizes[group] <= spare:
            whole[group] += 1
            spare -= int(sizes[group])
    return whole
