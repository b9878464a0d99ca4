"""Layer norms, scaled and shifted by a condition or by weights, cast for the layer that follows."""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.kernels import dispatch

EPSILON = 1e-6
"""Added to the variance, as in the official models."""


def modulate(x: Tensor, factor: Tensor, shift: Tensor, dtype: torch.dtype) -> Tensor:
    """Return LayerNorm(x) factor + shift, computed in float32.

    Args:
        x: [B, tokens, width].
        factor: [B, 1, width], width contiguous.
        shift: [B, 1, width], width contiguous.
        dtype: dtype of the result.

    Returns:
        [B, tokens, width].
    """
    if dispatch.runs_program(x):
        from kvbench.kernels.triton.modulate import modulate_triton

        return modulate_triton(x, factor, shift, dtype, EPSILON)
    x = x.float()
    # With weights torch's CPU kernel takes half the time that it takes without.
    normalized = F.layer_norm(x, x.shape[-1:], *_identity(x.shape[-1], x.device), EPSILON)
    return torch.addcmul(shift, normalized, factor).to(dtype)


@cache
def _identity(width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(
        False
    ):  # training may come later in this process; a compiler takes no keyword here
        return torch.ones(width, device=device), torch.zeros(width, device=device)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Return LayerNorm(x) weight + bias, computed in float32.

    Args:
        x: [B, tokens, width].
        weight: [width].
        bias: [width].
        dtype: dtype of the result.

    Returns:
        [B, tokens, width].
    """
    if dispatch.runs_program(x):
        return modulate(x, weight.expand(len(x), 1, -1), bias.expand(len(x), 1, -1), dtype)
    return F.layer_norm(x.float(), x.shape[-1:], weight.float(), bias.float(), EPSILON).to(dtype)
