"""A linear layer, with the activation inside where a fused routine exists."""

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.kernels.products import WORTH


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None, *, gelu: bool = False
) -> Tensor:
    """Return x W^T + b with all three rounded to `dtype`, then GELU (tanh form) if asked.

    On a CPU in float32 and without gradients oneDNN does both at once: it uses the widest vectors whoever made the
    processor, where the BLAS behind `torch.nn.functional.linear` may not (`benchmarks/layers.py` times both).

    Args:
        x: [..., in].
        weight: [out, in].
        bias: [out] or None.
        dtype: None: all are of x's.
        gelu: whether the activation follows.

    Returns:
        [..., out] in that dtype.
    """
    if dtype is not None:
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if _onednn(x, weight):
        activation, form = ("gelu", "tanh") if gelu else ("none", "")
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, activation, [], form)
    if gelu and bias is not None and x.is_cuda and not torch.is_grad_enabled():
        # The tanh form on a GPU alone: on a CPU this routine takes the exact one.
        y = torch._addmm_activation(bias, x.flatten(0, -2), weight.mT, use_gelu=True)
        return y.unflatten(0, x.shape[:-1])
    y = F.linear(x, weight, bias)
    return F.gelu(y, approximate="tanh") if gelu else y


def _onednn(x: Tensor, weight: Tensor) -> bool:
    learning = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    plain = x.device.type == "cpu" and x.dtype == torch.float32
    worth = x.numel() * len(weight) >= WORTH
    # oneDNN is asked last: a compiler cannot follow the question, and must not meet it while a network learns.
    return (
        plain
        and worth
        and not learning
        and torch.backends.mkldnn.is_available()
        and bool(torch.backends.mkldnn.enabled)
    )
