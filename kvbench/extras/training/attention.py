"""Causal attention with a fast gradient on a CPU."""

import torch
from torch import Tensor

QUERY_BLOCK = 68
"""Number of queries per block."""


def attend_causally(_layer: int, q: Tensor, k: Tensor, v: Tensor, _plain: object) -> Tensor:
    """Attend causally in blocks of queries, so that most masked scores are never computed.

    Written out, because the gradient of torch's fused attention is several times slower on a CPU. The arguments are as
    in `kvbench.models.parts.layers.Attend`: q [B, heads, tokens, D], k and v [B, KV heads, tokens, D], with heads a
    multiple of KV heads. The result has the shape of q.
    """
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    outputs = []
    for start in range(0, q.shape[2], QUERY_BLOCK):
        queries = q[:, :, start : start + QUERY_BLOCK]
        end = start + queries.shape[2]
        later = torch.ones(queries.shape[2], end, dtype=torch.bool, device=q.device).triu(start + 1)
        scores = (queries @ k[:, :, :end].transpose(-1, -2)) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        outputs.append(weights.to(v.dtype) @ v[:, :, :end])
    return torch.cat(outputs, 2)
