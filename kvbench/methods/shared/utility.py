"""Utility of tokens: their largest contribution to later outputs of attention, as LU-KV defines it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.methods.shared.output_norms import find_metric, square_lengths
from kvbench.methods.shared.select import choose_window
from kvbench.methods.shared.view import View


def attend_evenly(view: View, count: int) -> Tensor:
    """Return attention of `count` evenly spaced queries, float32 [rows, query heads per KV head, queries, slots]."""
    return view.scores(choose_window("uniform", view.segment, count)).softmax(-1)


def measure_utility(view: View, attention: Tensor, end: int) -> Tensor:
    """Return the utility of the tokens before a position to a segment, float32 [rows, slots]; 0 for other slots.

    Args:
        view: a layer of a full cache.
        attention: of some queries of the segment (`attend_evenly`).
        end: position after the last token that has a utility.
    """
    inside = (view.position >= 0) & (view.position < end)
    values = view.cached_values()[:, None].float()
    norms = square_lengths(values, find_metric(view)).clamp(min=0).sqrt() * inside[:, None]
    return combine_utility(attention, norms.expand(-1, attention.shape[1], -1), view.heads)


def combine_utility(attention: Tensor, norms: Tensor, heads: int) -> Tensor:
    """Return max over queries and query heads of attention x norm / sum of the layer's norms, float32 [rows, slots].

    The sum is over all heads and tokens of a sequence, which makes layers comparable (LU-KV, arXiv:2602.08585).

    Args:
        attention: [rows, query heads per KV head, queries, slots].
        norms: length of each value after W_o of a query head, [rows, query heads per KV head, slots].
        heads: KV heads of a sequence.
    """
    sums = norms.sum((1, 2)).unflatten(0, (-1, heads)).sum(1).repeat_interleave(heads)
    return (attention.amax(2) * (norms / (sums + 1e-9)[:, None, None])).amax(1)


def measure_lost_utility(view: View, masks: Sequence[Tensor], attention: Tensor) -> Tensor:
    """Return the utility to a segment of the past tokens that heads do not hold.

    Args:
        view: a layer of a full cache, after any segment but the first.
        masks: past positions that are held at each capacity, bool [rows, c_(k-1)].
        attention: of some queries of the segment (`attend_evenly`).

    Returns:
        float64 [H, capacities] on the CPU, sums over sequences.
    """
    utility = measure_utility(view, attention, view.segment.start).double()
    place = view.position.clamp(0, view.segment.start - 1)
    lost = [(utility * ~mask.gather(1, place)).sum(1).unflatten(0, (-1, view.heads)).sum(0) for mask in masks]
    return torch.stack(lost, 1).cpu()
