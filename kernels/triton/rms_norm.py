"""`rms_norm` and `add_rms_norm` on a GPU, in one pass."""

import torch
import triton.language as tl
from torch import Tensor

from kvbench.kernels.triton.launch import count_warps, kernel, next_power_of_2


@kernel()
def rms_norm_kernel(
    x, h, weight, stream, out,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, EPSILON: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Normalise one token's stream, after adding a branch if `ADD`; rounding as in `add_rms_norm`."""
    lane = tl.arange(0, BLOCK)
    inside = lane < WIDTH
    place = tl.program_id(0).to(tl.int64) * WIDTH + lane
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(h + place, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(stream.dtype.element_ty)
        tl.store(stream + place, rounded, mask=inside)
        value = rounded.to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, 0) / WIDTH + EPSILON)
    value = value.to(x.dtype.element_ty).to(tl.float32)
    value *= tl.load(weight + lane, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)


def rms_norm_triton(x: Tensor, h: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x + h, or x if h is None, and its norm; arguments as in `kvbench.kernels.rms_norm.add_rms_norm`."""
    x, block = x.contiguous(), next_power_of_2(x.shape[-1])
    stream = x if h is None else torch.empty_like(x)
    out = torch.empty_like(x, dtype=torch.promote_types(x.dtype, weight.dtype))
    rms_norm_kernel[(x.numel() // x.shape[-1],)](
        x, x if h is None else h.contiguous(), weight, stream, out,
        x.shape[-1], block, eps, h is not None, num_warps=count_warps(block),
    )  # fmt: skip
    return stream, out
