"""Root-mean-square norm (arXiv:1910.07467), alone or after a residual addition."""

import torch
from torch import Tensor
from torch.nn import functional as F


def uses_triton(x: Tensor) -> bool:
    """Return whether a Triton kernel handles a tensor: on a GPU, without gradients (kernels have no backward pass)."""
    return x.is_cuda and not torch.is_grad_enabled()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale x [..., channels] to a root mean square of 1 in float32, round to its dtype, then multiply by a weight.

    The weight is [channels]; `eps` is added to the mean square.
    """
    if uses_triton(x):
        from kvbench.kernels.triton.rms_norm import rms_norm_triton

        return rms_norm_triton(x, None, weight, eps)[1]
    if x.dtype == weight.dtype == torch.float32:  # there is no rounding in between
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    return F.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype) * weight


def add_rms_norm(x: Tensor, h: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the residual stream x + h [..., channels], rounded to their dtype, and its norm (`rms_norm`)."""
    if uses_triton(x):
        from kvbench.kernels.triton.rms_norm import rms_norm_triton

        return rms_norm_triton(x, h, weight, eps)
    x = x + h
    return x, rms_norm(x, weight, eps)
