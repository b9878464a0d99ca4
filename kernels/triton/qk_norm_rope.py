"""`qk_norm_rope` and `grouped_norm_rope` on a GPU: one pass from the projection to queries and keys."""

from typing import Literal

import torch
import triton.language as tl
from torch import Tensor

from kvbench.kernels.qk_norm_rope import HeadNorms
from kvbench.kernels.triton.launch import cdiv, kernel, next_power_of_2

BLOCK_T = 32
"""Tokens of a program."""
Norm = Literal["unit", "none", "rms", "layer"]


@kernel()
def norm_rope_kernel(
    joint, out, q_weight, k_weight, q_bias, k_bias, rotation,
    rows: tl.int32, tokens: tl.int32, q_heads: tl.int32, all_heads: tl.int32, out_heads: tl.int32,
    NORM: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
    ROTATE: tl.constexpr, EPSILON: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate a block of tokens of one head; rounds where the functions of torch do.

    The grid is (blocks of the tokens of all sequences, heads of queries and of keys).
    """
    head = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    lane = tl.arange(0, BLOCK_D)
    fits = lane < DIM
    inside = (row < rows)[:, None] & fits[None, :]
    x = tl.load(joint + (row * all_heads + head)[:, None] * DIM + lane[None, :], mask=inside, other=0.0)
    x = x.to(tl.float32)
    weight, bias, own = q_weight, q_bias, head
    if head >= q_heads:
        weight, bias, own = k_weight, k_bias, head - q_heads
    if NORM == "unit":
        length = tl.maximum(tl.sqrt(tl.sum(x * x, 1)), EPSILON)
        x *= (tl.load(weight + own) / length)[:, None]
    elif NORM == "rms":
        x *= tl.rsqrt(tl.sum(x * x, 1) / DIM + EPSILON)[:, None]
        x = x.to(joint.dtype.element_ty).to(tl.float32)
        x *= tl.load(weight + lane, mask=fits, other=0.0).to(tl.float32)[None, :]
        x = x.to(joint.dtype.element_ty).to(tl.float32)
    elif NORM == "layer":
        x = tl.where(fits[None, :], x - (tl.sum(x, 1) / DIM)[:, None], 0.0)
        x *= tl.rsqrt(tl.sum(x * x, 1) / DIM + EPSILON)[:, None]
        x *= tl.load(weight + own * DIM + lane, mask=fits, other=0.0).to(tl.float32)[None, :]
        x += tl.load(bias + own * DIM + lane, mask=fits, other=0.0).to(tl.float32)[None, :]
    if ROTATE:
        token = row % tokens
        factors = tl.load(rotation + token[:, None] * DIM + lane[None, :], mask=inside, other=0.0)
        cos, sin = tl.split(tl.reshape(factors, (BLOCK_T, BLOCK_D // 2, 2)))
        even, odd = tl.split(tl.reshape(x, (BLOCK_T, BLOCK_D // 2, 2)))
        x = tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (BLOCK_T, BLOCK_D))
    place = out + (row * out_heads + head)[:, None] * DIM + lane[None, :]
    tl.store(place, x.to(out.dtype.element_ty), mask=inside)


def qk_norm_rope_triton(
    qkv: Tensor, lengths: Tensor, rotation: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Overwrite queries and keys of `qkv` and return views of it; see `kvbench.kernels.qk_norm_rope.qk_norm_rope`.

    Heads stay inside tokens, as in the projection, so that attention's output is merged without a copy.
    """
    qkv = qkv.contiguous()
    norms = HeadNorms(lengths[0], lengths[1], None, None, epsilon)
    _launch(qkv.flatten(2, 3), qkv.flatten(2, 3), qkv.shape[3], norms, "unit", rotation)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    return q, k, v


def grouped_norm_rope_triton(
    joint: Tensor, kv_heads: int, norms: HeadNorms | None, rotation: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values; see `kvbench.kernels.qk_norm_rope.grouped_norm_rope`."""
    joint = joint.contiguous()
    heads = joint.shape[2] - 2 * kv_heads
    out = joint.new_empty(*joint.shape[:2], heads + kv_heads, joint.shape[3])
    norm: Norm = "none" if norms is None else "rms" if norms.q_bias is None else "layer"
    _launch(joint, out, heads, norms, norm, rotation)
    q, k = out.split((heads, kv_heads), 2)
    return q.transpose(1, 2), k.transpose(1, 2), joint[:, :, heads + kv_heads :].transpose(1, 2)


def _launch(
    joint: Tensor, out: Tensor, q_heads: int, norms: HeadNorms | None, norm: Norm, rotation: Tensor | None
) -> None:
    """Fill `out` [B, tokens, >= heads of queries and keys, D]; it may be `joint` itself."""
    batch, tokens, all_heads, dim = joint.shape
    kv_heads = (all_heads - q_heads) // 2
    table = joint if rotation is None else torch.view_as_real(rotation)
    # What a norm lacks is not read; any tensor takes its place.
    q_weight, k_weight, q_bias, k_bias, eps = norms or HeadNorms(joint, joint, None, None, 0.0)
    norm_rope_kernel[cdiv(batch * tokens, BLOCK_T), q_heads + kv_heads](
        joint, out, q_weight, k_weight, q_weight if q_bias is None else q_bias, k_weight if k_bias is None else k_bias,
        table, batch * tokens, tokens, q_heads, all_heads, out.shape[2],
        norm, dim, next_power_of_2(dim), BLOCK_T, rotation is not None, eps,
    )  # fmt: skip
