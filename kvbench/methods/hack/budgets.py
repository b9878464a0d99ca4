"""HACK++'s budgets: capacity of every head after every scale, by the reliance of later scales on its group."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from torch import Tensor

from kvbench.core.segments import ModelSpec
from kvbench.methods.shared.capacities import Floats, Ints, fill_gaps, fill_groups, shrink_early

MIN_WEIGHT = 1e-9
"""Minimum weight, relative to the largest weight; a smaller share would be the minimum of one token anyway."""


class Groups(NamedTuple):
    """Groups of heads, by layer and class; all heads of a group have the same capacity.

    Attributes:
        of_head: int64 [L, H], group of each head.
        sizes: int64 [groups], number of heads of each group.
        starts: first group of each layer, and the number of groups.
    """

    of_head: Ints
    sizes: Ints
    starts: tuple[int, ...]


def group_heads(contextual: Tensor) -> Groups:
    """Group heads by layer and class, bool [L, H]; an empty class has no group."""
    layers, heads = contextual.shape
    keys = np.arange(layers)[:, None] * 2 + contextual.numpy()
    groups, of_head, sizes = np.unique(keys, return_inverse=True, return_counts=True)
    starts = np.searchsorted(groups, 2 * np.arange(layers + 1))
    return Groups(of_head.reshape(layers, heads), sizes, tuple(starts.tolist()))


def measure_reliance(mass: Tensor, spec: ModelSpec) -> Floats:
    """Measure the reliance of later scales on a head's past, gamma [K - 1, L, H] (HACK++ Eq. 16).

    After scale k it is the sum over all later scales of the attention per past token. `mass` is float64 [L, H, K, K],
    the attention of scale k to scale s.
    """
    scales = len(spec.segments)
    per_token = [mass[..., k, :k].sum(-1).numpy() / spec.ends[k - 1] for k in range(1, scales)]
    return np.cumsum(per_token[::-1], 0)[::-1]


def weigh_groups(reliance: Floats, groups: Groups, tau: float) -> Floats:
    """Return the mean reliance of groups to the power `tau`, float64 [K - 1, groups], with maximum 1 at each scale."""
    mean = np.eye(len(groups.sizes))[groups.of_head] / groups.sizes
    weights = np.einsum("klh,lhg->kg", reliance, mean) ** tau
    largest = weights.max(1, keepdims=True)
    return np.where(largest > 0, weights / np.where(largest > 0, largest, 1), 1).clip(MIN_WEIGHT)


def share_budget(
    weights: Floats, groups: Groups, tokens: int, spec: ModelSpec, *, strict: bool, min_tokens: int = 1
) -> Ints:
    """Share B among the heads after every scale: int64 [K - 1, L, H] (HACK++ Eq. 17, 18).

    Weights are [K - 1, groups], `tokens` is floor(B), and a head that has seen `min_tokens` tokens holds at least
    these. If `strict`, B also holds after every layer, while some layers have their new share and other layers the
    previous share; deep layers then shrink a scale early where shallow layers grow.
    """
    capacities = np.zeros(weights.shape, np.int64)
    before = np.zeros(len(groups.sizes), np.int64)
    for k, length in enumerate(spec.lengths[:-1]):
        capacities[k] = before = fill_groups(tokens, weights[k], groups.sizes, before + length, min_tokens)
    if strict:
        capacities = _share_strictly(capacities, weights, groups, tokens, spec, min_tokens)
    return capacities[:, groups.of_head]


def _share_strictly(
    capacities: Ints, weights: Floats, groups: Groups, tokens: int, spec: ModelSpec, min_tokens: int
) -> Ints:
    """Lower the capacities of layers until B holds after every layer, and share each of them among groups."""
    arriving = [length * spec.heads for length in spec.lengths]
    layers = np.add.reduceat(capacities * groups.sizes, groups.starts[:-1], axis=1)
    layers = fill_gaps(shrink_early(layers, arriving, tokens), arriving, tokens)
    capacities, before = np.zeros_like(capacities), np.zeros(len(groups.sizes), np.int64)
    for k, length in enumerate(spec.lengths[:-1]):
        for layer, (start, stop) in enumerate(pairwise(groups.starts)):
            own = slice(start, stop)
            total, limits = int(layers[k, layer]), before[own] + length
            capacities[k, own] = fill_groups(total, weights[k, own], groups.sizes[own], limits, min_tokens)
        before = capacities[k]
    return capacities
