"""Gaussians of queries, their rotation to future positions, and the expected attention of keys.

Rotations act on pairs of channels i and i + D/2, the order of queries and keys without rotation (`View.keys`).
"""

import torch
from torch import Tensor


def fit_gaussian(
    queries: Tensor, mask: Tensor | None = None, *, unbiased: bool = False
) -> tuple[Tensor, Tensor]:
    """Return mean [..., D] and covariance [..., D, D] of queries [..., n, D], float32.

    Args:
        queries: queries of some heads.
        mask: bool [..., n], queries that count; None for all.
        unbiased: divide the covariance by n - 1 instead of n.
    """
    weight = torch.ones_like(queries[..., 0]) if mask is None else mask.float()
    count = weight.sum(-1, keepdim=True).clamp(min=1)
    mean = (queries * weight[..., None]).sum(-2) / count
    centred = (queries - mean[..., None, :]) * weight[..., None]
    return mean, centred.mT @ centred / (count - int(unbiased)).clamp(min=1)[..., None]


def rotate_channels(x: Tensor, factor: Tensor) -> Tensor:
    """Multiply pairs of channels of x [..., D] by complex numbers [D/2]."""
    first, second = x.chunk(2, -1)
    real, imaginary = factor.real, factor.imag
    return torch.cat((first * real - second * imaginary, first * imaginary + second * real), -1)


def rotate_gaussian(mean: Tensor, covariance: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate a mean [..., D] and a covariance [..., D, D] by a mean rotation, complex64 [D/2]."""
    return rotate_channels(mean, factor), rotate_channels(rotate_channels(covariance, factor).mT, factor).mT


def expect_logits(keys: Tensor, mean: Tensor, covariance: Tensor | None) -> Tensor:
    """Return ln E exp(q k) of Gaussian queries q, float32 [rows, query heads, slots] (arXiv:2510.00636, Eq. 5 to 7).

    Args:
        keys: [rows, slots, D].
        mean: mean of scaled queries, float32 [rows, query heads per KV head, D].
        covariance: float32 [rows, query heads per KV head, D, D]; None for 0.
    """
    keys = keys.float()
    logits = mean @ keys.mT
    if covariance is None:
        return logits
    variance = [((keys @ head) * keys).sum(-1) for head in covariance.unbind(1)]
    return logits + torch.stack(variance, 1) / 2
