"""LU-KV's table of pruned shares: hulls of loss curves, and greedy discarding by marginal loss."""

from typing import Literal

import numpy as np

from kvbench.core.segments import ModelSpec
from kvbench.methods.shared.capacities import Floats, Ints, allocate_anew

Scope = Literal["global", "layer"]
"""Heads that compete: all heads of the model, or of a layer."""
PERCENTS = 100
"""Steps of the global compression; the table has a row for each of 1 to 99 %."""


def find_marginal_losses(utility: Floats) -> Floats:
    """Return the slope of the lower convex hull of each head's loss curve, [..., tokens], in the order of discarding.

    A curve is the sum of the utilities [..., tokens], in this order, of the tokens discarded so far. The slopes of its
    hull are the non-decreasing sequence that is nearest to the utilities in the least squares (isotonic regression).
    """
    from scipy.optimize import isotonic_regression  # slow to import

    heads = utility.reshape(-1, utility.shape[-1]).astype(np.float64)
    return np.array([isotonic_regression(head).x for head in heads]).reshape(utility.shape)


def discard(losses: Floats, tokens: int, scope: Scope) -> Floats:
    """Return the pruned share of each head at 1 to 99 % of global compression, float64 [99, L, H].

    The token of the smallest marginal loss is discarded first, on ties in the lower layer and head, until that share of
    all tokens, or all tokens of the curves, are discarded. The marginal losses [L, H, n] are non-decreasing; a head has
    `tokens` tokens and discards at most n.
    """
    if scope == "layer":
        return np.concatenate([discard(layer[None], tokens, "global") for layer in losses], 1)
    layers, heads, most = losses.shape
    order = losses.reshape(-1).argsort(kind="stable") // max(most, 1)
    counts = [round(percent / PERCENTS * layers * heads * tokens) for percent in range(1, PERCENTS)]
    pruned = [np.bincount(order[:count], minlength=layers * heads) for count in counts]
    return np.array(pruned).reshape(-1, layers, heads) / tokens


def sum_percents(utility: Floats) -> Floats:
    """Return the summed utility of each percent of the tokens, float64 [..., 100], from [..., tokens]."""
    curves = np.concatenate((np.zeros_like(utility[..., :1]), utility.cumsum(-1)), -1)
    bounds = np.linspace(0, utility.shape[-1], PERCENTS + 1)
    heads = [
        np.interp(bounds, np.arange(curves.shape[-1]), curve)
        for curve in curves.reshape(-1, curves.shape[-1])
    ]
    return np.diff(heads).reshape(*utility.shape[:-1], PERCENTS)


def average_curves(losses: Floats, floor: float, scope: Scope) -> Floats:
    """Return the table [99, L, H] of mean loss curves [L, H, 100], the losses of each further percent of the tokens."""
    most = PERCENTS - max(1, round(PERCENTS * floor))
    return discard(find_marginal_losses(losses)[..., :most], PERCENTS, scope)


def interpolate_shares(table: Floats, ratio: float) -> Floats:
    """Return the pruned share of each head at a global compression `ratio` in 0..1, float64 [L, H].

    It is linear between the rows of the table [99, L, H], no token at 0 and every token at 1.
    """
    whole = np.concatenate((np.zeros_like(table[:1]), table, np.ones_like(table[:1])))
    low = min(int(ratio * PERCENTS + 1e-9), PERCENTS - 1)
    part = ratio * PERCENTS - low
    return (1 - part) * whole[low] + part * whole[low + 1]


def round_shares(wanted: Floats, total: int, lower: int, reach: Ints) -> Ints:
    """Return whole capacities of heads with the sum `total`, int64 [T], close to the `wanted` shares, float64 [T].

    Shares are rounded down, and the rest goes to the heads that lack most (largest remainders). If the lower bounds
    take more than `total`, the heads furthest above their shares lose it. A head holds at most `reach`, int64 [T], and
    at least `lower` if `reach` permits; `total` lies between the sums of both bounds.
    """
    least = np.minimum(lower, reach)
    held = np.clip(np.floor(wanted + 1e-9).astype(np.int64), least, reach)
    while spare := total - int(held.sum()):
        step = 1 if spare > 0 else -1
        lack = (step * (wanted - held)).round(9)  # rounding errors must not order equal parts
        lack[held == (reach if spare > 0 else least)] = -np.inf
        first = (-lack).argsort(kind="stable")[: min(abs(spare), int((lack > lack.max() - 1).sum()))]
        held[first] += step
    return held


def allocate_shares(table: Floats, spec: ModelSpec, total: int, *, floor: float, minimum: int) -> Ints:
    """Return the capacity of each head after each cached segment, int64 [K - 1, L, H] (`capacities.allocate_anew`).

    Heads keep their shares of the tokens so far at the compression that B, `total` whole tokens, demands, at most the
    tokens that they have left (`round_shares`). The table of pruned shares is [99, L, H]. A head keeps at least the
    share `floor` of the tokens so far and `minimum` tokens, both limited to B / T.
    """

    def allocate(k: int, reach: Ints) -> Ints:
        end = spec.ends[k]
        wanted = (1 - interpolate_shares(table, 1 - total / (spec.all_heads * end)).reshape(-1)) * end
        lower = min(max(round(floor * end), minimum), total // spec.all_heads)
        return round_shares(wanted, total, lower, reach)

    return allocate_anew(spec, total, allocate)
