"""CaM: values that leave are added to those of the slots behind them, at random (ICML 2024; kvpress's CAMPress)."""

import torch
from torch import Tensor

from kvbench.methods.merging.merge import split_pairs


def find_windows(stays: Tensor, size: int, rows: slice, slots: slice) -> Tensor:
    """Return the next `size` slots that stay behind each of some slots, bool [rows, some slots, slots].

    Args:
        stays: bool [rows, slots], in order of position.
        size: how many; fewer at the end.
        rows: some rows.
        slots: some slots.
    """
    number = stays[rows].cumsum(1)  # of slots that stay, from 1; what leaves has that of the one before
    ahead = number[:, None] - number[:, slots, None]
    return stays[rows, None] & (ahead > 0) & (ahead <= size)


def measure_probabilities(attention: Tensor, merges: Tensor, stays: Tensor, size: int) -> Tensor:
    """Return the probability that each slot is merged, float32 [rows, slots]; 0 where it does not merge.

    It is the slot's attention over the mean of the slots in its window, at most 1. Where that mean is 0, or the window
    empty, it is 1, or 0 of a slot without attention.

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
    """Add to each value its share of those that are merged into it; returns [rows, slots, D] in the dtype of `values`.

    Args:
        values: [rows, slots, D].
        weight: float32 [rows, slots], how much of each slot is merged, in equal parts into its window.
        stays: bool [rows, slots].
        size: slots of the window.
        divisor: of a part; None for the slots that the window has.
        normalise: divide a value by 1 and the weights that went into it.
    """
    payload = torch.cat((values.float(), torch.ones_like(values[..., :1], dtype=torch.float32)), -1)
    added = torch.zeros_like(payload)
    for rows, slots in split_pairs(stays):
        window = find_windows(stays, size, rows, slots).float()
        parts = window.sum(-1, keepdim=True).clamp(min=1) if divisor is None else divisor
        added[rows] += (window * (weight[rows, slots, None] / parts)).mT @ payload[rows, slots]
    total, weights = values.float() + added[..., :-1], added[..., -1:]
    return (total / (1 + weights) if normalise else total).to(values.dtype)
