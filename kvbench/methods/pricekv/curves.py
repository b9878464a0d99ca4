"""Error of attention in heads that hold no more than a capacity, as a curve over capacities."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.core.segments import ModelSpec
from kvbench.methods.pricekv.errors import find_metric, square_lengths
from kvbench.methods.shared.select import choose_best, choose_window
from kvbench.methods.shared.view import View

CAPACITIES = 18
"""Capacities at which errors are measured, beside 0: a geometric row up to all tokens, whose first is a 128th."""
TINY = torch.finfo(torch.float32).tiny


def list_capacities(spec: ModelSpec) -> list[int]:
    """Return the capacities of a head at which errors are measured, in rising order."""
    whole = spec.cached_length
    steps = (whole * 128 ** (i / (CAPACITIES - 1) - 1) for i in range(CAPACITIES))
    return sorted({0, *(max(1, round(step)) for step in steps)})


def measure_errors(view: View, kept: Sequence[Tensor], queries: int, power: float) -> Tensor:
    """Return how far attention's output is off, squared, in heads that hold only some of the past.

    Attention is that of the full cache, without what was dropped; the segment's own tokens are there. An error is a sum
    over the query heads that share a head's keys, to a power, and then a mean over queries.

    Args:
        view: a layer of a full cache, after any segment but the first.
        kept: what is held of the past, for each capacity, bool [rows, c_(k-1)].
        queries: evenly spaced queries of the segment that are looked at.
        power: of an error.

    Returns:
        float64 [H, capacities] on the CPU, sums over sequences.
    """
    attention, values, outputs = attend_evenly(view, queries)
    metric, current = find_metric(view), view.position >= view.segment.start
    place = view.position.clamp(0, view.segment.start - 1)
    errors = []
    for held in kept:
        left = attention * (held.gather(1, place) | current)[:, None, None]
        apart = (left @ values) / left.sum(-1, keepdim=True).clamp(min=TINY) - outputs
        of_heads = square_lengths(apart, metric).sum(1).clamp(min=0).double().pow(power)
        errors.append(of_heads.mean(1).unflatten(0, (-1, view.heads)).sum(0).cpu())
    return torch.stack(errors, 1)


def attend_evenly(view: View, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the attention of evenly spaced queries of a segment, the values, and attention's outputs.

    Returns:
        float32 [rows, query heads per KV head, queries, slots], [rows, 1, slots, D] and [rows, query heads per KV head,
        queries, D].
    """
    attention = view.scores(choose_window("uniform", view.segment, count)).softmax(-1)
    values = view.cached_values()[:, None].float()
    return attention, values, attention @ values


def spread_slots(values: Tensor, view: View) -> Tensor:
    """Return values of slots [rows, slots] by their positions, [rows, c_k], 0 of positions that a row has not."""
    end = view.segment.end
    rows = values.new_zeros(len(values), end + 1)
    return rows.scatter_(1, torch.where(view.position < 0, end, view.position), values)[:, :end]


def keep_best(scores: Tensor, held: Tensor | None, capacity: int | Tensor) -> Tensor:
    """Return which positions stay after a segment: the best of those that are held and of the segment's own.

    Args:
        scores: [rows, c_k].
        held: bool [rows, c_(k-1)], what was held before the segment; None for nothing.
        capacity: one number, or int64 [rows].
    """
    there = torch.ones_like(scores, dtype=torch.bool)
    if held is not None:
        there[:, : held.shape[1]] = held
    return choose_best(scores.masked_fill(~there, -torch.inf), capacity) & there
