"""`qk_norm_rope` and `grouped_norm_rope` on a GPU, in one pass over the projection."""

from typing import Literal

import torch
import triton.language as tl
from torch import Tensor

from kvbench.kernels.triton.launch import cdiv, kernel, next_power_of_2

BLOCK_T = 32
"""Tokens that one program handles."""
Norm = Literal["unit", "none", "rms", "layer"]
Norms = tuple[Tensor, Tensor, Tensor | None, Tensor | None, float]
"""Fields of `kvbench.kernels.qk_norm_rope.HeadNorms`."""


@kernel()
def norm_rope_kernel(
    joint, out, q_weight, k_weight, q_bias, k_bias, rotation,
    rows: tl.int32, tokens: tl.int32, q_heads: tl.int32, kv_heads: tl.int32,
    NORM: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
    IN_PLACE: tl.constexpr, ROTATE: tl.constexpr, EPSILON: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate a block of tokens of one head, or copy values; rounding as in the torch functions.

    Grid: block of the tokens of all sequences; heads of queries, of keys and, unless in place, of values.
    """
    head = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    lane = tl.arange(0, BLOCK_D)
    fits = lane < DIM
    inside = (row < rows)[:, None] & fits[None, :]
    own = (row * (q_heads + 2 * kv_heads) + head)[:, None] * DIM + lane[None, :]
    x = tl.load(joint + own, mask=inside, other=0.0).to(tl.float32)
    weight, bias, first, count = q_weight, q_bias, 0, q_heads
    if head >= q_heads:
        weight, bias, first, count = k_weight, k_bias, q_heads, kv_heads
    if head >= q_heads + kv_heads:
        first = q_heads + kv_heads
    else:
        if NORM == "unit":
            length = tl.maximum(tl.sqrt(tl.sum(x * x, 1)), EPSILON)
            x *= (tl.load(weight + head - first) / length)[:, None]
        elif NORM == "rms":
            x *= tl.rsqrt(tl.sum(x * x, 1) / DIM + EPSILON)[:, None]
            x = x.to(joint.dtype.element_ty).to(tl.float32)
            x *= tl.load(weight + lane, mask=fits, other=0.0).to(tl.float32)[None, :]
            x = x.to(joint.dtype.element_ty).to(tl.float32)
        elif NORM == "layer":
            channel = (head - first) * DIM + lane
            x = tl.where(fits[None, :], x - (tl.sum(x, 1) / DIM)[:, None], 0.0)
            x *= tl.rsqrt(tl.sum(x * x, 1) / DIM + EPSILON)[:, None]
            x *= tl.load(weight + channel, mask=fits, other=0.0).to(tl.float32)[None, :]
            x += tl.load(bias + channel, mask=fits, other=0.0).to(tl.float32)[None, :]
        if ROTATE:
            turn = rotation + (row % tokens)[:, None] * DIM + lane[None, :]
            cos, sin = tl.split(tl.reshape(tl.load(turn, mask=inside, other=0.0), (BLOCK_T, BLOCK_D // 2, 2)))
            even, odd = tl.split(tl.reshape(x, (BLOCK_T, BLOCK_D // 2, 2)))
            x = tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (BLOCK_T, BLOCK_D))
    if not IN_PLACE:  # queries, then keys, then values
        own = (first * rows.to(tl.int64) + row * count + head - first)[:, None] * DIM + lane[None, :]
    tl.store(out + own, x.to(out.dtype.element_ty), mask=inside)


def qk_norm_rope_triton(
    qkv: Tensor, lengths: Tensor, rotation: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Overwrite queries and keys of `qkv` and return views of it; see `kvbench.kernels.qk_norm_rope.qk_norm_rope`.

    Heads stay inside tokens, as in the projection, so that the output of attention needs no copy.
    """
    qkv = qkv.contiguous()
    norms = (lengths[0], lengths[1], None, None, epsilon)
    _launch(qkv.flatten(2, 3), None, qkv.shape[3], norms, "unit", rotation)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    return q, k, v


def grouped_norm_rope_triton(
    joint: Tensor, kv_heads: int, norms: Norms | None, rotation: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values, each contiguous, so that heads become rows without a copy.

    Arguments as in `kvbench.kernels.qk_norm_rope.grouped_norm_rope`.
    """
    joint = joint.contiguous()
    batch, tokens, all_heads, dim = joint.shape
    heads = (all_heads - 2 * kv_heads, kv_heads, kv_heads)
    out = joint.new_empty(joint.numel())
    norm: Norm = "none" if norms is None else "rms" if norms[2] is None else "layer"
    _launch(joint, out, kv_heads, norms, norm, rotation)
    blocks = out.split([batch * tokens * count * dim for count in heads])
    q, k, v = (
        x.view(batch, tokens, count, dim).transpose(1, 2) for x, count in zip(blocks, heads, strict=True)
    )
    return q, k, v


def _launch(
    joint: Tensor, out: Tensor | None, kv_heads: int, norms: Norms | None, norm: Norm, rotation: Tensor | None
) -> None:
    """Fill `out` with queries, then keys, then values; None overwrites queries and keys in `joint`."""
    batch, tokens, all_heads, dim = joint.shape
    written = all_heads if out is not None else all_heads - kv_heads
    table = joint if rotation is None else torch.view_as_real(rotation)
    # Placeholders for absent tensors, which are not read.
    q_weight, k_weight, q_bias, k_bias, eps = norms or (joint, joint, None, None, 0.0)
    norm_rope_kernel[cdiv(batch * tokens, BLOCK_T), written](
        joint, joint if out is None else out,
        q_weight, k_weight, q_weight if q_bias is None else q_bias, k_weight if k_bias is None else k_bias,
        table, batch * tokens, tokens, all_heads - 2 * kv_heads, kv_heads,
        norm, dim, next_power_of_2(dim), BLOCK_T, out is None, rotation is not None, eps,
    )  # fmt: skip
