"""Queries of the newest segment before rotation, their Gaussians, and the mean rotation of the positions to come.

Rotations act on pairs of channels i and i + D/2, the order of queries and keys without rotation (`View.keys`).
"""

import torch
from torch import Tensor

from kvbench.core.segments import ModelSpec
from kvbench.methods.shared.select import find_valid_queries
from kvbench.methods.shared.view import View


def read_queries(
    view: View, spec: ModelSpec, leading: int, newest: int | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return queries before rotation, float32 [rows, query heads per KV head, n, D], and a mask of valid queries.

    The mask is bool [rows, 1, n], or None if each row has all queries. The queries are the `newest` queries of the
    segment (None for all), without the first `leading` queries of a next-token model's prompt.
    """
    length, is_prompt = view.segment.length, view.segment.index == 0 and spec.family == "next-token"
    dropped = leading if is_prompt else 0
    first = min(max(length - (newest or length), dropped), length - 1)
    chosen = torch.arange(first, length)
    valid = find_valid_queries(view, chosen if view.padding is None else chosen - dropped)
    return view.queries(chosen, rotated=False), None if valid is None else valid[:, None]


def average_rotation(view: View, spec: ModelSpec, future: int) -> Tensor | None:
    """Return the mean RoPE factor of the positions to come, complex64 [D/2]; None without RoPE.

    These are the next scale's positions in next-scale models, otherwise the next `future` positions, at most to the end
    of the generation.
    """
    later = spec.segments[view.segment.index + 1 :] or [view.segment]
    end = min(later[-1].end, view.segment.end + future)
    if spec.family == "next-scale":
        end = later[0].end
    rotation = view.rotation(torch.arange(min(view.segment.end, end - 1), end))
    return None if rotation is None else rotation.mean(0)


def fit_gaussian(
    queries: Tensor, mask: Tensor | None = None, *, unbiased: bool = False
) -> tuple[Tensor, Tensor]:
    """Return mean [..., D] and covariance [..., D, D] of queries [..., n, D], float32.

    The covariance has the divisor n, or n - 1 if `unbiased`. `mask`, bool [..., n], marks queries that count; None for
    all.
    """
    weight = torch.ones_like(queries[..., 0]) if mask is None else mask.float()
    count = weight.sum(-1, keepdim=True).clamp(min=1)
    mean = (queries * weight[..., None]).sum(-2) / count
    centred = (queries - mean[..., None, :]) * weight[..., None]
    return mean, centred.mT @ centred / (count - int(unbiased)).clamp(min=1)[..., None]


def rotate_channels(x: Tensor, factor: Tensor) -> Tensor:
    """Multiply the channel pairs (i, i + D/2) of x [..., D] by complex factors [D/2]."""
    first, second = x.chunk(2, -1)
    real, imaginary = factor.real, factor.imag
    return torch.cat((first * real - second * imaginary, first * imaginary + second * real), -1)


def rotate_gaussian(mean: Tensor, covariance: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate a mean [..., D] and a covariance [..., D, D] by a mean rotation, complex64 [D/2]."""
    return rotate_channels(mean, factor), rotate_channels(rotate_channels(covariance, factor).mT, factor).mT


def expect_logits(keys: Tensor, mean: Tensor, covariance: Tensor | None) -> Tensor:
    """Return ln E exp(q k) of Gaussian queries q, float32 [rows, query heads, slots] (arXiv:2510.00636, Eq. 5 to 7).

    Keys are [rows, slots, D]; mean and covariance (None for 0) of the scaled queries are float32 [rows, query heads per
    KV head, D] and [rows, query heads per KV head, D, D].
    """
    keys = keys.float()
    logits = mean @ keys.mT
    if covariance is None:
        return logits
    variance = [((keys @ head) * keys).sum(-1) for head in covariance.unbind(1)]
    return logits + torch.stack(variance, 1) / 2
