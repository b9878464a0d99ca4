"""Capacities of layers that grow and shrink from scale to scale, without exceeding a total after any layer."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def shrink_early(capacity: Ints, arriving: Sequence[int], total: int) -> Ints:
    """Lower capacities so far that no order of growing and shrinking layers exceeds `total`; int64 [K - 1, L].

    While scale k runs, layers up to l hold what they may after it and the others what they held before. Where that is
    too much, the deepest layers that are to shrink do so right after scale k - 1, and only as far as needed.

    Args:
        capacity: int64 [K - 1, L], at most `total` in each row.
        arriving: tokens that come to every layer at each scale.
        total: tokens that all layers may hold together.
    """
    held, layers = capacity.copy(), capacity.shape[1]
    before = np.minimum(held[0], arriving[0])
    for k in range(1, len(held)):
        after = np.minimum(held[k], before + arriving[k])
        for layer in range(layers):
            excess = int(after[: layer + 1].sum() + before[layer + 1 :].sum()) - total
            for deep in range(layers - 1, layer, -1):
                given = min(max(excess, 0), max(before[deep] - after[deep], 0))
                before[deep] -= given
                excess -= given
                held[k - 1, deep] = before[deep] if given else held[k - 1, deep]
        before = after
    return held


def fill_gaps(held: Ints, arriving: Sequence[int], total: int) -> Ints:
    """Give what early shrinking frees to layers that let go of it before it is needed: int64 [K - 1, L].

    Shallow layers may hold more after a scale, and shrink at the next one before a deeper layer grows. A layer takes as
    much as it has tokens for and as no instant of either scale forbids.

    Args:
        held: int64 [K - 1, L], never above `total` in any order, and no more than a layer can reach.
        arriving: tokens that come to every layer at each scale.
        total: tokens that all layers may hold together.
    """
    held, layers = held.copy(), held.shape[1]
    before = np.zeros(layers, np.int64)
    for k in range(len(held)):
        after = held[k + 1] if k + 1 < len(held) else held[k]
        for layer in range(layers):
            # While this scale runs, from this layer on; while the next one does, up to the layer before.
            now = held[k].cumsum()[layer:] + before.sum() - before.cumsum()[layer:]
            later = np.concatenate(([held[k].sum()], held[k].sum() + (after - held[k]).cumsum()[:layer]))
            spare = total - max(int(now.max()), int(later.max()))
            held[k, layer] += min(spare, int(before[layer]) + arriving[k] - int(held[k, layer]))
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
