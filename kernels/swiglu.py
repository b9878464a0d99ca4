"""Gate of a SwiGLU feed-forward layer (arXiv:2002.05202)."""

from torch import Tensor
from torch.nn import functional as F

from kvbench.kernels import dispatch


def silu_mul(gate: Tensor, x: Tensor) -> Tensor:
    """Return silu(gate) x; SiLU is computed in float32 and rounded to the inputs' dtype before the product.

    Args:
        gate: [...].
        x: of gate's shape and dtype.
    """
    if dispatch.runs_program(gate):
        from kvbench.kernels.triton.swiglu import silu_mul_triton

        return silu_mul_triton(gate, x)
    return F.silu(gate) * x
