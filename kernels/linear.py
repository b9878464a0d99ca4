"""Linear layer, with a fused activation if a routine exists."""

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.kernels.products import MIN_MULTIPLICATIONS


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None, *, gelu: bool = False
) -> Tensor:
    """Return x W^T + b, all three rounded to `dtype` unless it is None, followed by GELU (tanh form) if `gelu` is set.

    x is [..., in], the weight [out, in], the bias [out] or None, the result [..., out].

    On a CPU oneDNN computes large float32 products without gradients, GELU included, with a processor's widest vectors;
    the BLAS behind `torch.nn.functional.linear` may not (docs/laboratory.md times both).
    """
    if dtype is not None:
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if _uses_onednn(x, weight):
        activation, form = ("gelu", "tanh") if gelu else ("none", "")
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, activation, [], form)
    if gelu and bias is not None and x.is_cuda and not torch.is_grad_enabled():
        # On a CPU this routine computes the exact form.
        y = torch._addmm_activation(bias, x.flatten(0, -2), weight.mT, use_gelu=True)
        return y.unflatten(0, x.shape[:-1])
    y = F.linear(x, weight, bias)
    return F.gelu(y, approximate="tanh") if gelu else y


def _uses_onednn(x: Tensor, weight: Tensor) -> bool:
    # The size is checked first, because decoding makes hundreds of small products a step. oneDNN is checked last,
    # because torch.compile cannot trace these calls and must not reach them in training.
    return (
        x.numel() * weight.shape[0] >= MIN_MULTIPLICATIONS
        and x.device.type == "cpu"
        and x.dtype == torch.float32
        and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
        and torch.backends.mkldnn.is_available()
        and bool(torch.backends.mkldnn.enabled)
    )
