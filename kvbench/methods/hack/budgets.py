"""Capacity of every head after every scale, by how much later scales rely on its layer and class."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from torch import Tensor

from kvbench.core.segments import ModelSpec
from kvbench.methods.shared.capacities import Floats, Ints, fill_gaps, fill_groups, shrink_early

MIN_WEIGHT = 1e-9
"""Of the largest one: below it a share is the one token that every head has."""


class Groups(NamedTuple):
    """Heads of one class in one layer, layer after layer; every head of a group holds equally much.

    Attributes:
        of_head: int64 [L, H], the group of each head.
        sizes: int64 [groups], heads of each.
        starts: first group of each layer, and how many groups there are.
    """

    of_head: Ints
    sizes: Ints
    starts: tuple[int, ...]


def group_heads(contextual: Tensor) -> Groups:
    """Group heads by layer and class; a class that a layer lacks has no group.

    Args:
        contextual: bool [L, H].
    """
    layers, heads = contextual.shape
    place = np.arange(layers)[:, None] * 2 + contextual.numpy()
    found, of_head, sizes = np.unique(place, return_inverse=True, return_counts=True)
    starts = np.searchsorted(found, 2 * np.arange(layers + 1))
    return Groups(of_head.reshape(layers, heads), sizes, tuple(starts.tolist()))


def measure_reliance(mass: Tensor, spec: ModelSpec) -> Floats:
    """Measure how much later scales rely on a head's past, gamma [K - 1, L, H] (HACK++ Eq. 16).

    After scale k it is the sum, over all later ones, of the attention that goes to the scales before them, for each
    token of those.

    Args:
        mass: float64 [L, H, K, K], attention of scale k to scale s.
        spec: the model's shapes.
    """
    scales = len(spec.segments)
    paid = [mass[..., k, :k].sum(-1).numpy() / spec.ends[k - 1] for k in range(1, scales)]
    return np.cumsum(paid[::-1], 0)[::-1]


def weigh_groups(reliance: Floats, groups: Groups, tau: float) -> Floats:
    """Return the mean reliance of each group to the power `tau`, [K - 1, groups], the largest of each scale being 1."""
    one = np.eye(len(groups.sizes))[groups.of_head] / groups.sizes
    weights = np.einsum("klh,lhg->kg", reliance, one) ** tau
    largest = weights.max(1, keepdims=True)
    return np.where(largest > 0, weights / np.where(largest > 0, largest, 1), 1).clip(MIN_WEIGHT)


def share_budget(
    weights: Floats, groups: Groups, tokens: int, spec: ModelSpec, *, strict: bool, min_tokens: int = 1
) -> Ints:
    """Share B among the heads after every scale: int64 [K - 1, L, H] (HACK++ Eq. 17, 18).

    Args:
        weights: [K - 1, groups].
        groups: of heads.
        tokens: floor(B).
        spec: the model's shapes.
        strict: whether B holds after every layer too, while some layers have their share of one scale and the others
            still that of the scale before; deep layers then shrink a scale early where shallow ones grow.
        min_tokens: tokens that every head holds, once there are so many.
    """
    held = np.zeros(weights.shape, np.int64)
    before = np.zeros(len(groups.sizes), np.int64)
    for k, length in enumerate(spec.lengths[:-1]):
        held[k] = before = fill_groups(tokens, weights[k], groups.sizes, before + length, min_tokens)
    if strict:
        held = _share_strictly(held, weights, groups, tokens, spec, min_tokens)
    return held[:, groups.of_head]


def _share_strictly(
    held: Ints, weights: Floats, groups: Groups, tokens: int, spec: ModelSpec, min_tokens: int
) -> Ints:
    """Lower what layers hold so far that B holds after every one, and share what each has left among its groups."""
    arriving = [length * spec.heads for length in spec.lengths]
    layers = np.add.reduceat(held * groups.sizes, groups.starts[:-1], axis=1)
    layers = fill_gaps(shrink_early(layers, arriving, tokens), arriving, tokens)
    held, before = np.zeros_like(held), np.zeros(len(groups.sizes), np.int64)
    for k, length in enumerate(spec.lengths[:-1]):
        for layer, (start, stop) in enumerate(pairwise(groups.starts)):
            own = slice(start, stop)
            total, reach = int(layers[k, layer]), before[own] + length
            held[k, own] = fill_groups(total, weights[k, own], groups.sizes[own], reach, min_tokens)
        before = held[k]
    return held
