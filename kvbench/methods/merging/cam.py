"""CaM: random addition of evicted values to the values of later slots (ICML 2024; kvpress's CAMPress)."""

import torch
from torch import Tensor

from kvbench.methods.merging.merge import split_pairs


def find_windows(stays: Tensor, size: int, rows: slice, slots: slice) -> Tensor:
    """Return the next `size` slots that stay after each of some slots, bool [some rows, some slots, slots]."""
    number = stays[rows].cumsum(1)  # number of staying slots up to each slot
    ahead = number[:, None] - number[:, slots, None]
    return stays[rows, None] & (ahead > 0) & (ahead <= size)


def measure_probabilities(attention: Tensor, merges: Tensor, stays: Tensor, size: int) -> Tensor:
    """Return the probability that each slot is merged, float32 [rows, slots]; 0 where it does not merge.

    It is the slot's attention divided by the mean attention of its window, at most 1. If this mean is 0 or the window
    is empty, it is 1, or 0 for a slot without attention.

    Args:
        attention: float32 [rows, slots].
        merges: bool [rows, slots], slots that leave and may be merged.
        stays: bool [rows, slots].
        size: slots of the window.
    """
    mean = torch.zeros_like(attention)
    for rows, slots in split_pairs(merges):
        window = find_windows(stays, size, rows, slots).float()
        sums = (window @ attention[rows, :, None])[..., 0]
        mean[rows, slots] = sums / window.sum(-1).clamp(min=1)
    ratio = torch.where(mean > 0, attention / mean.where(mean > 0, 1), (attention > 0).float())
    return ratio.clamp(0, 1).masked_fill(~merges, 0)


def add_values(
    values: Tensor,
    weight: Tensor,
    stays: Tensor,
    size: int,
    *,
    divisor: int | None = None,
    normalise: bool = False,
) -> Tensor:
    """Add evicted values to the values of their windows in equal parts: [rows, slots, D] in the dtype of `values`.

    Args:
        values: [rows, slots, D].
        weight: float32 [rows, slots], weight of each slot that is merged.
        stays: bool [rows, slots].
        size: slots of the window.
        divisor: divisor of a part; None for the number of slots in the window.
        normalise: divide each value by 1 plus the added weights.
    """
    payload = torch.cat((values.float(), torch.ones_like(values[..., :1], dtype=torch.float32)), -1)
    added = torch.zeros_like(payload)
    for rows, slots in split_pairs(stays):
        window = find_windows(stays, size, rows, slots).float()
        count = window.sum(-1, keepdim=True).clamp(min=1) if divisor is None else divisor
        added[rows] += (window * (weight[rows, slots, None] / count)).mT @ payload[rows, slots]
    total, weights = values.float() + added[..., :-1], added[..., -1:]
    return (total / (1 + weights) if normalise else total).to(values.dtype)
