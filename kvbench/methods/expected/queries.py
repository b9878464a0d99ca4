"""Queries of the newest segment before their rotation, and the mean rotation of the positions to come."""

import torch
from torch import Tensor

from kvbench.core.segments import ModelSpec
from kvbench.methods.shared.select import find_valid_queries
from kvbench.methods.shared.view import View


def read_queries(
    view: View, spec: ModelSpec, leading: int, newest: int | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return queries before rotation, float32 [rows, query heads per KV head, n, D], and which a row has, [rows, 1, n].

    The mask is bool, or None if each row has all queries.

    Args:
        view: the layer.
        spec: the model's shapes.
        leading: first queries of a next-token model's prompt that are left out.
        newest: number of the segment's newest queries; None for all.
    """
    length, is_prompt = view.segment.length, view.segment.index == 0 and spec.family == "next-token"
    dropped = leading if is_prompt else 0
    first = min(max(length - (newest or length), dropped), length - 1)
    chosen = torch.arange(first, length)
    valid = find_valid_queries(view, chosen if view.padding is None else chosen - dropped)
    return view.queries(chosen, rotated=False), None if valid is None else valid[:, None]


def average_rotation(view: View, spec: ModelSpec, future: int) -> Tensor | None:
    """Return the mean RoPE factor of the positions to come, complex64 [D/2]; None without RoPE.

    Args:
        view: the layer.
        spec: the model's shapes.
        future: number of positions, at most those that the generation still has; in next-scale models the next scale's.
    """
    later = spec.segments[view.segment.index + 1 :] or [view.segment]
    end = min(later[-1].end, view.segment.end + future)
    if spec.family == "next-scale":
        end = later[0].end
    rotation = view.rotation(torch.arange(min(view.segment.end, end - 1), end))
    return None if rotation is None else rotation.mean(0)
