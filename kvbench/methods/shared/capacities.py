"""Capacities of heads and layers: even shares, and shares that grow and shrink without exceeding a total."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvbench.core.segments import ModelSpec

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def share_evenly(tokens: int, spec: ModelSpec) -> list[int | tuple[int, ...]]:
    """Share whole tokens evenly among all heads; the first heads, layer by layer, get the remainder.

    A sequence may hold `tokens`, at most the full cache. The result is the capacity of each layer's heads: an int if
    they are equal, otherwise a tuple.
    """
    even, more = divmod(tokens, spec.all_heads)
    extras = (min(max(more - layer * spec.heads, 0), spec.heads) for layer in range(spec.layers))
    return [share_layer(spec.heads * even + extra, spec.heads) for extra in extras]


def share_by_head(tokens: int, spec: ModelSpec) -> Tensor:
    """Return the capacity of each head by `share_evenly`, int64 [L, H]."""
    return torch.stack([torch.tensor(capacity).expand(spec.heads) for capacity in share_evenly(tokens, spec)])


def share_layer(tokens: int, heads: int) -> int | tuple[int, ...]:
    """Share a layer's tokens among its heads; the first heads get the remainder.

    >>> share_layer(12, 4), share_layer(14, 4)
    (3, (4, 4, 3, 3))
    """
    even, more = divmod(tokens, heads)
    return (*(even + 1,) * more, *(even,) * (heads - more)) if more else even


def shrink_early(capacity: Ints, arriving: Sequence[int], total: int, heads: int = 1) -> Ints:
    """Lower capacities so that `total` is never exceeded while layers grow and shrink; int64 [K - 1, L x heads].

    While segment k runs, layers up to l have their new capacity, and deeper layers their old capacity. If the sum
    exceeds `total`, the deepest layers that will shrink do so after segment k - 1 already, only as far as needed.
    Columns are sorted by layer, `heads` of each, and a layer's columns change together. A column gets `arriving[k]` new
    tokens at segment k. The sum of each row of capacities is at most `total`.
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

    Shallow layers may hold more after a segment, and shrink at the next segment before a deeper layer grows. A layer
    takes at most its tokens and the free capacity at each moment of both segments; its first columns take first.
    Arguments are like those of `shrink_early`. The sum of `held` never exceeds `total`, and an entry is at most the
    tokens of its column.
    """
    held, columns = held.copy(), held.shape[1]
    before = np.zeros(columns, np.int64)
    for k in range(len(held)):
        after = held[k + 1] if k + 1 < len(held) else held[k]
        for begin in range(0, columns, heads):
            end = begin + heads
            # Totals while this segment runs, from this layer on; while the next one runs, up to the layer before.
            now = (held[k].cumsum() + before.sum() - before.cumsum())[end - 1 :: heads]
            moved = (after - held[k]).cumsum()[heads - 1 : begin : heads]
            later = held[k].sum() + np.concatenate(([0], moved))
            spare = total - max(int(now.max()), int(later.max()))
            missing = before[begin:end] + arriving[k] - held[k, begin:end]
            held[k, begin:end] += (spare - (missing.cumsum() - missing)).clip(0, missing)
        before = held[k]
    return held


def allocate_anew(spec: ModelSpec, total: int, allocate: Callable[[int, Ints], Ints]) -> Ints:
    """Return the capacity of each head after each cached segment if B is allocated anew each time: int64 [K - 1, L, H].

    While the full cache fits, heads keep all tokens. Otherwise `allocate` returns capacities of all heads, int64 [T],
    from the segment and the tokens that each head can hold. Deep heads that will shrink do so early where shallow heads
    grow, so that `total`, B in whole tokens, is not exceeded between layers.
    """
    amounts, before = [], np.zeros(spec.all_heads, np.int64)
    for k, length in enumerate(spec.lengths[:-1]):
        reach = before + length
        before = allocate(k, reach) if reach.sum() > total else reach
        amounts.append(before)
    strict = shrink_early(np.array(amounts), spec.lengths, total, spec.heads)
    return fill_gaps(strict, spec.lengths, total, spec.heads).reshape(-1, spec.layers, spec.heads)


def fill_groups(tokens: int, weights: Floats, sizes: Ints, reach: Ints, min_tokens: int = 1) -> Ints:
    """Share tokens in proportion to weights, between bounds on each head: int64 [groups], per head.

    Tokens above a head's bound are shared among the other groups (water-filling). Shares are rounded down, and the
    remainder goes to whole groups that it suffices for, in order of their fractions. The upper bound of a head is
    `reach`, the lower bound the smaller of `reach` and `min_tokens`; `tokens` are at least the sum of lower bounds.
    Weights are positive, `sizes` are the heads of each group; all arrays are [groups].
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
