"""torch's fused attention with its log-sum-exp, so that attention over other keys can be merged with it.

Backends differ in the shape of the log-sum-exp, not in its base: all give that of the scaled scores in nats.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl

from kvbench.kernels.attention_states import State, attend_nothing

Backend = Literal["cudnn", "flash", "efficient", "cpu"]
ATEN: Any = torch.ops.aten


FEW = 64
"""Queries of a row below which cuDNN is not asked: not all of its versions take a single one."""


def choose_backend(head_dim: int, dtype: torch.dtype, queries: int, device: torch.device) -> Backend:
    """Return the fastest backend there is for so many queries a row of a head dim and dtype, by published rates.

    On an H100 (128 channels, forward) FlashAttention-3 reaches 638 TFLOP/s, cuDNN 609, FlashAttention-2 368
    (arXiv:2407.08608). The third is behind `flash` wherever nobody has activated another
    (`torch.nn.attention.activate_flash_attention_impl`).
    """
    if device.type != "cuda":
        return "cpu"
    capability = torch.cuda.get_device_properties(device).major
    if dtype == torch.float32 or capability < 8 or head_dim > 256:
        return "efficient"
    activated = current_flash_attention_impl() is not None
    return "cudnn" if capability >= 9 and head_dim <= 128 and queries >= FEW and not activated else "flash"


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool = False, backend: Backend | None = None
) -> State:
    """Attend to keys that all queries of a row see, or see causally.

    Args:
        q: [sequences, heads, queries, D]; with grouped queries the heads of one KV head lie behind each other in
            `queries`: query m belongs to token m % tokens.
        k: [sequences, heads, tokens, D]; of no tokens no backend is asked.
        v: shaped like k.
        scale: factor on q k^T.
        causal: query m sees the first m % tokens + 1 keys; else all.
        backend: whose attention; None for the fastest.
    """
    tokens, shape = k.shape[2], q.shape
    if not tokens:
        return attend_nothing(q)
    backend = backend or choose_backend(shape[3], q.dtype, shape[2], q.device)
    if causal and shape[2] > tokens:  # every query head by itself, so that all see their own tokens
        folds = shape[2] // tokens
        q = q.unflatten(2, (folds, tokens)).flatten(1, 2)
        if backend == "efficient":
            k, v = (x.repeat_interleave(folds, 1) for x in (k, v))
    if backend == "cudnn":
        call = ATEN._scaled_dot_product_cudnn_attention
        out, lse, *_ = call(q, k, v, None, True, 0.0, causal, scale=scale)
        lse = lse.view(q.shape[:3])
    elif backend == "flash":
        out, lse, *_ = ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
    elif backend == "efficient":
        call = ATEN._scaled_dot_product_efficient_attention
        out, lse, *_ = call(q, k, v, None, True, 0.0, causal, scale=scale)
        lse = lse[:, :, : q.shape[2]]  # padded to a multiple of 32 queries
    else:
        out, lse = ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return out.reshape(shape), lse.reshape(shape[:3]).contiguous()
