"""Norms of a slot's contribution to the residual stream."""

import torch
from torch import Tensor

from kvbench.methods.shared.view import View

MAX_NUMBERS = 2**24
"""Largest number of projected values in memory at a time."""


def measure_output(view: View, order: int) -> Tensor:
    """Return ||W_o v|| of each slot, the mean over the query heads of a KV head, float32 [rows, slots].

    If the model does not expose W_o, it is the norm of the value.

    Args:
        view: the layer.
        order: order of the norm, 1 or 2.
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
    few = max(1, MAX_NUMBERS // (values.shape[1] * weight.shape[1]))
    parts = (torch.stack([part @ one.float().mT for one in weight]) for part in values.split(few))
    return torch.cat([torch.linalg.vector_norm(part, order, dim=-1).mean(0) for part in parts])


def find_metric(view: View) -> Tensor | None:
    """Return W^T W of each query head's output projection, float32 [rows, query heads per KV head, D, D].

    None if the model does not provide W; distances are then between attention's outputs themselves.
    """
    weight = view.output_projection()
    if weight is None:
        return None
    return (weight.mT.float() @ weight.float()).repeat(view.sequences, 1, 1, 1)


def square_lengths(x: Tensor, metric: Tensor | None) -> Tensor:
    """Return squared lengths of vectors [rows, query heads or 1, n, D] under `find_metric`, [rows, query heads, n]."""
    return (x * (x if metric is None else x @ metric)).sum(-1)
