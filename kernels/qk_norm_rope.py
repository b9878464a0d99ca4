"""Queries, keys and values from one projection: norm of each head, rotary embedding, cast."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.kernels.rms_norm import rms_norm, uses_triton

EPSILON = 1e-12
"""Minimum divisor of a vector, as in `torch.nn.functional.normalize`."""


class HeadNorms(NamedTuple):
    """Norms of each head of queries and keys: layer norms with biases, RMS norms without.

    Attributes:
        q_weight: [D], or [heads x D] for a layer norm.
        k_weight: [D], or [KV heads x D] for a layer norm.
        q_bias: [heads x D]; None for an RMS norm.
        k_bias: [KV heads x D]; None for an RMS norm.
        eps: added to the mean square, or to the variance.
    """

    q_weight: Tensor
    k_weight: Tensor
    q_bias: Tensor | None
    k_bias: Tensor | None
    eps: float


def qk_norm_rope(qkv: Tensor, lengths: Tensor, rotation: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the inputs of cosine attention (arXiv:2412.04431, section 3.3; rotation of adjacent pairs).

    Args:
        qkv: [B, tokens, 3, H, D], the projection, D contiguous and even; overwritten without gradients.
        lengths: float32 [2, H], lengths of the scaled queries (their temperature) and keys (1).
        rotation: complex64 [tokens, D/2], factor on adjacent pairs; None for no rotation.

    Returns:
        q, k, v [B, H, tokens, D] in qkv's dtype; lengths and rotation are computed in float32.
    """
    if uses_triton(qkv):
        from kvbench.kernels.triton.qk_norm_rope import qk_norm_rope_triton

        return qk_norm_rope_triton(qkv, lengths, rotation, EPSILON)
    stored = qkv[:, :, :2]
    qk = stored.float()
    factor = lengths[..., None] / torch.linalg.vector_norm(qk, dim=-1, keepdim=True).clamp_min(EPSILON)
    if rotation is not None:
        qk = rotate(qk, rotation[:, None, None])
    scaled = (qk * factor).to(qkv.dtype) if torch.is_grad_enabled() else torch.mul(qk, factor, out=stored)
    q, k = scaled.permute(2, 0, 3, 1, 4)
    return q, k, qkv[:, :, 2].transpose(1, 2)


def grouped_norm_rope(
    joint: Tensor, kv_heads: int, norms: HeadNorms | None, rotation: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the inputs of grouped-query attention: queries and keys are normalised, then rotated in float32.

    An RMS norm is rounded to joint's dtype before and after its weight (`rms_norm`); a layer norm is not rounded.

    Args:
        joint: [B, tokens, heads + 2 KV heads, D], the projection; it is not modified.
        kv_heads: number of KV heads.
        norms: None for no norm.
        rotation: complex64 [tokens, D/2].

    Returns:
        q [B, heads, tokens, D], k and v [B, KV heads, tokens, D], in joint's dtype.
    """
    if uses_triton(joint):
        from kvbench.kernels.triton.qk_norm_rope import grouped_norm_rope_triton

        return grouped_norm_rope_triton(joint, kv_heads, norms, rotation)
    sizes = joint.shape[2] - 2 * kv_heads, kv_heads, kv_heads
    if norms is None:  # queries and keys lie side by side
        turned = rotate(joint[:, :, :-kv_heads].float(), rotation[:, None]).to(joint.dtype).transpose(1, 2)
        q, k = turned.split_with_sizes(sizes[:2], 1)
        return q, k, joint[:, :, -kv_heads:].transpose(1, 2)
    q, k, v = joint.split_with_sizes(sizes, 2)
    q = normalize(q, norms.q_weight, norms.q_bias, norms.eps)
    k = normalize(k, norms.k_weight, norms.k_bias, norms.eps)
    q, k = (rotate(x.float(), rotation[:, None]).to(joint.dtype).transpose(1, 2) for x in (q, k))
    return q, k, v.transpose(1, 2)


def normalize(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Normalise every head of [..., heads, D]: RMS norm in x's dtype, or with a bias layer norm in float32."""
    if bias is None:
        return rms_norm(x, weight, eps)
    scale, shift = (parameter.float().view(x.shape[-2:]) for parameter in (weight, bias))
    return F.layer_norm(x.float(), x.shape[-1:], eps=eps) * scale + shift


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate adjacent pairs of float32 [..., D] by complex64 [..., D/2]."""
    rotated = torch.view_as_complex(x.view(*x.shape[:-1], -1, 2)) * rotation
    return torch.view_as_real(rotated).flatten(-2)
