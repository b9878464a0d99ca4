"""`modulate` on a GPU: one pass, with the output in the dtype of the next layer."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.triton.launch import count_warps, next_power_of_2


@triton.jit(do_not_specialize=["tokens"])
def modulate_kernel(
    x, factor, shift, out, tokens, factor_stride, shift_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, EPSILON: tl.constexpr,
):  # fmt: skip
    """Normalise and modulate one token; all tokens of a sequence share factor and shift."""
    row = tl.program_id(0).to(tl.int64)
    sequence = row // tokens
    lane = tl.arange(0, BLOCK)
    inside = lane < WIDTH
    value = tl.load(x + row * WIDTH + lane, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(value, 0) / WIDTH
    centred = tl.where(inside, value - mean, 0.0)
    normalized = centred * tl.rsqrt(tl.sum(centred * centred, 0) / WIDTH + EPSILON)
    times = tl.load(factor + sequence * factor_stride + lane, mask=inside, other=0.0).to(tl.float32)
    plus = tl.load(shift + sequence * shift_stride + lane, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + lane, (normalized * times + plus).to(out.dtype.element_ty), mask=inside)


def modulate_triton(x: Tensor, factor: Tensor, shift: Tensor, dtype: torch.dtype, epsilon: float) -> Tensor:
    """Return LayerNorm(x) factor + shift; arguments and result as in `kvbench.kernels.modulate.modulate`."""
    batch, tokens, width = x.shape
    x, block = x.contiguous(), next_power_of_2(width)
    out = torch.empty_like(x, dtype=dtype)
    modulate_kernel[(batch * tokens,)](
        x, factor, shift, out, tokens, factor.stride(0), shift.stride(0),
        width, block, epsilon, num_warps=count_warps(block),
    )  # fmt: skip
    return out
