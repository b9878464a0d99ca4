"""`silu_mul` on a GPU, in one pass."""

import torch
import triton.language as tl
from torch import Tensor

from kvbench.kernels.triton.launch import cdiv, kernel

BLOCK = 1024
"""Elements that one program handles."""


@kernel()
def silu_mul_kernel(
    gate, x, out, GATE_STEP: tl.constexpr, X_STEP: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Gate a block of a row; rounding as in `silu_mul`. Steps from row to row count elements. Grid: rows, blocks.

    Widths and steps are constants, from which the compiler knows that loads are aligned.
    """
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < WIDTH
    value = tl.load(gate + row * GATE_STEP + place, mask=inside, other=0.0).to(tl.float32)
    value = (value / (1 + tl.exp(-value))).to(out.dtype.element_ty).to(tl.float32)
    value *= tl.load(x + row * X_STEP + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + place, value.to(out.dtype.element_ty), mask=inside)


def silu_mul_triton(gate: Tensor, x: Tensor) -> Tensor:
    """Return silu(gate) x; arguments as in `kvbench.kernels.swiglu.silu_mul`, each row contiguous or copied."""
    width = gate.shape[-1]
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    gate, x = (tensor.reshape(-1, width) for tensor in (gate, x))
    if gate.stride(1) != 1 or x.stride(1) != 1:
        gate, x = gate.contiguous(), x.contiguous()
    silu_mul_kernel[(len(gate), cdiv(width, BLOCK))](gate, x, out, gate.stride(0), x.stride(0), width, BLOCK)
    return out
