"""Norms of a slot's contribution to the residual stream, and a slot's utility as LU-KV defines it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.methods.shared.select import choose_window
from kvbench.methods.shared.view import View

MAX_VALUES = 2**24
"""Maximum number of projected values in memory at a time."""


def measure_output(view: View, order: int) -> Tensor:
    """Return ||W_o v|| of each slot, the mean over the query heads of a KV head, float32 [rows, slots].

    If the model does not expose W_o, it is the norm of the value. The norm is of order 1 or 2.
    """
    values, weight = view.cached_values().float(), view.output_projection()
    if weight is None:
        return torch.linalg.vector_norm(values, order, dim=-1)
    by_head = values.unflatten(0, (-1, view.heads))
    return torch.stack([_project(by_head[:, h], weight[h], order) for h in range(view.heads)], 1).flatten(
        0, 1
    )


def _project(values: Tensor, weight: Tensor, order: int) -> Tensor:
    """Return the norms [sequences, slots] of values [sequences, slots, D] under weights [query heads, width, D]."""
    few = max(1, MAX_VALUES // (values.shape[1] * weight.shape[1]))
    parts = (torch.stack([part @ of_head.float().mT for of_head in weight]) for part in values.split(few))
    return torch.cat([torch.linalg.vector_norm(part, order, dim=-1).mean(0) for part in parts])


def find_metric(view: View) -> Tensor | None:
    """Return W^T W of each query head's output projection, float32 [rows, query heads per KV head, D, D].

    None if the model does not expose W; distances are then between attention outputs before W.
    """
    weight = view.output_projection()
    if weight is None:
        return None
    return (weight.mT.float() @ weight.float()).repeat(view.sequences, 1, 1, 1)


def square_lengths(x: Tensor, metric: Tensor | None) -> Tensor:
    """Return squared lengths of vectors [rows, query heads or 1, n, D] under `find_metric`, [rows, query heads, n]."""
    return (x * (x if metric is None else x @ metric)).sum(-1)


def attend_evenly(view: View, count: int) -> Tensor:
    """Return attention of `count` evenly spaced queries, float32 [rows, query heads per KV head, queries, slots]."""
    return view.scores(choose_window("uniform", view.segment, count)).softmax(-1)


def measure_utility(view: View, attention: Tensor, end: int) -> Tensor:
    """Return the utility to a segment of the tokens before position `end`, float32 [rows, slots]; 0 for other slots.

    The view is of a full cache. Attention is that of some queries of the segment (`attend_evenly`).
    """
    inside = (view.position >= 0) & (view.position < end)
    values = view.cached_values()[:, None].float()
    norms = square_lengths(values, find_metric(view)).clamp(min=0).sqrt() * inside[:, None]
    return combine_utility(attention, norms.expand(-1, attention.shape[1], -1), view.heads)


def combine_utility(attention: Tensor, norms: Tensor, heads: int) -> Tensor:
    """Return max over queries and query heads of attention x norm / sum of the layer's norms, float32 [rows, slots].

    The sum is over all heads and tokens of a sequence, which makes layers comparable (LU-KV, arXiv:2602.08585).
    Attention is [rows, query heads per KV head, queries, slots]. Norms of values after each query head's W_o are [rows,
    query heads per KV head, slots]. A sequence has `heads` KV heads.
    """
    sums = norms.sum((1, 2)).unflatten(0, (-1, heads)).sum(1).repeat_interleave(heads)
    return (attention.amax(2) * (norms / (sums + 1e-9)[:, None, None])).amax(1)


def measure_lost_utility(view: View, masks: Sequence[Tensor], attention: Tensor) -> Tensor:
    """Return the utility to a segment of the past tokens that heads do not hold: float64 [H, capacities] on the CPU.

    The result is summed over sequences. The view is of a full cache, after any segment except the first. `masks`, bool
    [rows, c_(k-1)], mark the past positions that are held at each capacity. Attention is by `attend_evenly`.
    """
    utility = measure_utility(view, attention, view.segment.start).double()
    past = view.position.clamp(0, view.segment.start - 1)
    lost = [(utility * ~mask.gather(1, past)).sum(1).unflatten(0, (-1, view.heads)).sum(0) for mask in masks]
    return torch.stack(lost, 1).cpu()
