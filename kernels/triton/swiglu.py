"""`silu_mul` on a GPU, in one pass."""

import torch
import triton.language as tl
from torch import Tensor

from kvbench.kernels.triton.launch import cdiv, kernel

BLOCK = 1024
"""Elements per program."""


@kernel()
def silu_mul_kernel(gate, x, out, numbers: tl.int64, BLOCK: tl.constexpr):
    """Gate a block of elements; rounding as in `silu_mul`."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < numbers
    value = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    value = (value / (1 + tl.exp(-value))).to(out.dtype.element_ty).to(tl.float32)
    value *= tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)


def silu_mul_triton(gate: Tensor, x: Tensor) -> Tensor:
    """Return silu(gate) x; arguments as in `kvbench.kernels.swiglu.silu_mul`."""
    gate, x = gate.contiguous(), x.contiguous()
    out = torch.empty_like(gate)
    silu_mul_kernel[(cdiv(gate.numel(), BLOCK),)](gate, x, out, gate.numel(), BLOCK)
    return out
