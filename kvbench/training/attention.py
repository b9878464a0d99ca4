"""Causal attention as training wants it on a CPU."""

import torch
from torch import Tensor

TOGETHER = 68
"""Queries whose attention is computed together."""


def attend_causally(_layer: int, q: Tensor, k: Tensor, v: Tensor, _plain: object) -> Tensor:
    """Attend causally, some queries at a time, so that most of what is masked is never computed.

    Written out, since the gradient of torch's fused attention is several times slower on a CPU. The arguments are those
    of `kvbench.models.parts.layers.Attend`: q [B, heads, tokens, D], k and v [B, KV heads, tokens, D], with heads a
    multiple of KV heads. The result has the shape of q.
    """
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    parts = []
    for start in range(0, q.shape[2], TOGETHER):
        asked = q[:, :, start : start + TOGETHER]
        end = start + asked.shape[2]
        later = torch.ones(asked.shape[2], end, dtype=torch.bool, device=q.device).triu(start + 1)
        scores = (asked @ k[:, :, :end].transpose(-1, -2)) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        parts.append(weights.to(v.dtype) @ v[:, :, :end])
    return torch.cat(parts, 2)
