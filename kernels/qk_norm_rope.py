"""Queries, keys and values out of one projection: unit length, temperature, rotary positions, cast."""

import torch
from torch import Tensor

EPSILON = 1e-12
"""Least length that a vector is divided by, as in `torch.nn.functional.normalize`."""


def qk_norm_rope(qkv: Tensor, lengths: Tensor, rotation: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the inputs of cosine attention (arXiv:2412.04431, section 3.3; rotation of neighbouring pairs).

    Args:
        qkv: [B, tokens, 3, H, D], the projection, D contiguous and even; overwritten without gradients.
        lengths: float32 [2, H], what queries (their temperature) and keys (1) are scaled to.
        rotation: complex64 [tokens, D/2], what neighbouring pairs are multiplied by; None leaves them as they are.

    Returns:
        q, k, v [B, H, tokens, D] in qkv's dtype; lengths and rotation are computed in float32.
    """
    if qkv.is_cuda and not torch.is_grad_enabled():  # the kernel has no backward pass
        from kvbench.kernels.triton.qk_norm_rope import qk_norm_rope_triton

        return qk_norm_rope_triton(qkv, lengths, rotation, EPSILON)
    given = qkv[:, :, :2]
    qk = given.float()
    factor = lengths[..., None] / torch.linalg.vector_norm(qk, dim=-1, keepdim=True).clamp_min(EPSILON)
    if rotation is not None:
        qk = rotate(qk, rotation[:, None, None])
    done = (qk * factor).to(qkv.dtype) if torch.is_grad_enabled() else torch.mul(qk, factor, out=given)
    q, k = done.permute(2, 0, 3, 1, 4)
    return q, k, qkv[:, :, 2].transpose(1, 2)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate neighbouring pairs of float32 [..., D] by complex64 [..., D/2]."""
    rotated = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * rotation
    return torch.view_as_real(rotated).flatten(-2)
