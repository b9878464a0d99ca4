"""Reference attention of one row in double precision."""

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]


def scores(q: Tensor, past: Tensor, k: Tensor, scale: float, causal: bool = False) -> Tensor:
    """Return scores float64 [batch, queries, length + tokens] of q [batch, queries, D] and past and present keys."""
    logits = q.double() @ torch.cat((past.double(), k.double()), 1).transpose(1, 2) * scale
    if causal:
        length, tokens = past.shape[1], k.shape[1]
        for query in range(q.shape[1]):
            logits[:, query, length + query % tokens + 1 :] = -torch.inf
    return logits


def attention(q: Tensor, past: Pair, present: Pair, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Return the output [batch, queries, D] and the log-sum-exp [batch, queries], both float64."""
    logits = scores(q, past[0], present[0], scale, causal)
    values = torch.cat((past[1].double(), present[1].double()), 1)
    return logits.softmax(-1) @ values, logits.logsumexp(-1)


def received(q: Tensor, past: Tensor, k: Tensor, scale: float, power: int, causal: bool = False) -> Tensor:
    """Return the mean over the queries of a power of the probabilities, float64 [batch, length + tokens]."""
    return scores(q, past, k, scale, causal).softmax(-1).pow(power).mean(1)
