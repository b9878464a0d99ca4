"""Gaussians of queries, turned to positions to come, and the attention that keys can expect of them.

Rotations act on pairs of channels i and i + D/2, as queries and keys lie without rotation (`View.keys`).
"""

import torch
from torch import Tensor


def fit_gaussian(
    queries: Tensor, counts: Tensor | None = None, *, unbiased: bool = False
) -> tuple[Tensor, Tensor]:
    """Return mean [..., D] and covariance [..., D, D] of queries [..., n, D], float32.

    Args:
        queries: of some heads.
        counts: bool [..., n], queries that count; None for all.
        unbiased: divide by one less than their number.
    """
    used = torch.ones_like(queries[..., 0]) if counts is None else counts.float()
    number = used.sum(-1, keepdim=True).clamp(min=1)
    mean = (queries * used[..., None]).sum(-2) / number
    centred = (queries - mean[..., None, :]) * used[..., None]
    return mean, centred.mT @ centred / (number - int(unbiased)).clamp(min=1)[..., None]


def turn_channels(x: Tensor, factor: Tensor) -> Tensor:
    """Multiply pairs of channels of x [..., D] by complex numbers [D/2]."""
    first, second = x.chunk(2, -1)
    real, imaginary = factor.real, factor.imag
    return torch.cat((first * real - second * imaginary, first * imaginary + second * real), -1)


def turn_gaussian(mean: Tensor, covariance: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate a mean [..., D] and a covariance [..., D, D] by a mean rotation, complex64 [D/2]."""
    return turn_channels(mean, factor), turn_channels(turn_channels(covariance, factor).mT, factor).mT


def expect_logits(keys: Tensor, mean: Tensor, covariance: Tensor | None) -> Tensor:
    """Return ln E exp(q k) of Gaussian queries q, float32 [rows, query heads, slots] (arXiv:2510.00636, Eq. 5 to 7).

    Args:
        keys: [rows, slots, D].
        mean: of scaled queries, float32 [rows, query heads per KV head, D].
        covariance: float32 [rows, query heads per KV head, D, D]; None for none.
    """
    keys = keys.float()
    logits = mean @ keys.mT
    if covariance is None:
        return logits
    spread = [((keys @ each) * keys).sum(-1) for each in covariance.unbind(1)]
    return logits + torch.stack(spread, 1) / 2
