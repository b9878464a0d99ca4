"""Layer norms, scaled and shifted by a condition or by weights, and cast for the next layer."""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.kernels.rms_norm import uses_triton

EPSILON = 1e-6
"""Added to the variance, as in the official models."""


def modulate(x: Tensor, factor: Tensor, shift: Tensor, dtype: torch.dtype) -> Tensor:
    """Return LayerNorm(x) factor + shift in `dtype`, computed in float32.

    x and the result are [B, tokens, width]; factor and shift are [B, 1, width], width contiguous.
    """
    if uses_triton(x):
        from kvbench.kernels.triton.modulate import modulate_triton

        return modulate_triton(x, factor, shift, dtype, EPSILON)
    x = x.float()
    # torch's CPU kernel is twice as fast with weights.
    normalized = F.layer_norm(x, x.shape[-1:], *_make_identity(x.shape[-1], x.device), EPSILON)
    return torch.addcmul(shift, normalized, factor).to(dtype)


@cache
def _make_identity(width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    # Training may follow in this process. The argument is positional for torch.compile.
    with torch.inference_mode(False):
        return torch.ones(width, device=device), torch.zeros(width, device=device)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Return LayerNorm(x) weight + bias in `dtype`, computed in float32: x [B, tokens, width], parameters [width]."""
    if uses_triton(x):
        return modulate(x, weight.expand(len(x), 1, -1), bias.expand(len(x), 1, -1), dtype)
    return F.layer_norm(x.float(), x.shape[-1:], weight.float(), bias.float(), EPSILON).to(dtype)
