"""A linear layer, with the activation inside where a fused routine exists."""

import torch
from torch import Tensor
from torch.nn import functional as F


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, gelu: bool = False) -> Tensor:
    """X W^T + b, then GELU (tanh form) if asked.

    On a CPU in float32 and without gradients oneDNN does both at once: it uses the widest vectors whoever made the
    processor, where the BLAS behind `torch.nn.functional.linear` may not (`benchmarks/layers.py` times both).

    Args:
        x: [..., in].
        weight: [out, in], of x's dtype.
        bias: [out], likewise, or None.
        gelu: whether the activation follows.

    Returns:
        [..., out] in x's dtype.
    """
    if _onednn(x, weight):
        activation, form = ("gelu", "tanh") if gelu else ("none", "")
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, activation, [], form)
    y = F.linear(x, weight, bias)
    return F.gelu(y, approximate="tanh") if gelu else y


def _onednn(x: Tensor, weight: Tensor) -> bool:
    learning = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    plain = x.device.type == "cpu" and x.dtype == torch.float32 and x.numel() > 0
    usable = torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)
    return plain and not learning and usable
