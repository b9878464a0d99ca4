"""Error curves: the error of attention's output as a function of a head's capacity."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.methods.shared.output_norms import find_metric, square_lengths
from kvbench.methods.shared.select import choose_best
from kvbench.methods.shared.view import View

TINY = torch.finfo(torch.float32).tiny


def measure_errors(view: View, masks: Sequence[Tensor], attention: Tensor, power: float) -> Tensor:
    """Return the squared error of attention's output if heads hold only a part of the past.

    Attention is computed on the full cache, masked and renormalised; the segment's own tokens are always included. The
    error is summed over the query heads of a KV head, raised to a power and averaged over queries.

    Args:
        view: a layer of a full cache, after any segment but the first.
        masks: past positions that are held at each capacity, bool [rows, c_(k-1)].
        attention: of some queries of the segment (`utility.attend_evenly`).
        power: exponent of the error.

    Returns:
        float64 [H, capacities] on the CPU, sums over sequences.
    """
    values = view.cached_values()[:, None].float()
    outputs = attention @ values
    metric, current = find_metric(view), view.position >= view.segment.start
    place = view.position.clamp(0, view.segment.start - 1)
    errors = []
    for mask in masks:
        masked = attention * (mask.gather(1, place) | current)[:, None, None]
        difference = (masked @ values) / masked.sum(-1, keepdim=True).clamp(min=TINY) - outputs
        of_heads = square_lengths(difference, metric).sum(1).clamp(min=0).double().pow(power)
        errors.append(of_heads.mean(1).unflatten(0, (-1, view.heads)).sum(0).cpu())
    return torch.stack(errors, 1)


def keep_best(scores: Tensor, mask: Tensor | None, capacity: int | Tensor) -> Tensor:
    """Return the mask of the best positions after a segment, among the stored ones and the segment's own.

    The shapes are [rows, c_k] of scores and of the result, [rows, c_(k-1)] of the mask before the segment (None before
    the first segment), and [rows] of the capacity if it is not one number.
    """
    candidates = torch.ones_like(scores, dtype=torch.bool)
    if mask is not None:
        candidates[:, : mask.shape[1]] = mask
    return choose_best(scores.masked_fill(~candidates, -torch.inf), capacity) & candidates
