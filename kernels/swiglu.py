"""Gate of a SwiGLU feed-forward layer (arXiv:2002.05202)."""

from torch import Tensor
from torch.nn import functional as F

from kvbench.kernels.rms_norm import uses_triton


def silu_mul(gate: Tensor, x: Tensor) -> Tensor:
    """Return silu(gate) x; SiLU is computed in float32 and rounded to the inputs' dtype before the product.

    Both are [..., channels] of one dtype, and may be views, such as the halves of one product.
    """
    if uses_triton(gate):
        from kvbench.kernels.triton.swiglu import silu_mul_triton

        return silu_mul_triton(gate, x)
    return F.silu(gate) * x
