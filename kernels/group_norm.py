"""Group norm (arXiv:1803.08494), alone or followed by SiLU, of image decoders."""

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.kernels.rms_norm import uses_triton


def group_norm(
    x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float, *, silu: bool = False
) -> Tensor:
    """Normalise each group of channels over an image; scale, shift and, with `silu`, activate the result.

    Arithmetic is in float32. The norm is rounded to the dtype of its weights and the result to x's dtype: weights in
    float32 round once, as `torch.autocast` does; weights in 16 bits round twice, as a network cast to 16 bits does.

    x and the result are [B, C, H, W], weight and bias [C] of one dtype. `groups` divides C; `eps` is added to variance.
    """
    if uses_triton(x) and x.is_contiguous(memory_format=torch.channels_last):
        from kvbench.kernels.triton.group_norm import group_norm_triton

        return group_norm_triton(x, groups, weight, bias, eps, silu=silu)
    out = F.group_norm(x.to(weight.dtype), groups, weight, bias, eps)
    if silu:
        out = F.silu(out, inplace=not torch.is_grad_enabled())
    return out.to(x.dtype)
