"""Attention of one row in double precision, as plain as it can be written."""

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]


def scores(q: Tensor, past: Tensor, k: Tensor, scale: float, causal: bool = False) -> Tensor:
    """float64 [batch, queries, length + tokens] of q [batch, queries, D] and keys [batch, length or tokens, D]."""
    found = q.double() @ torch.cat((past.double(), k.double()), 1).transpose(1, 2) * scale
    if causal:
        length, tokens = past.shape[1], k.shape[1]
        for query in range(q.shape[1]):
            found[:, query, length + query % tokens + 1 :] = -torch.inf
    return found


def attention(q: Tensor, past: Pair, present: Pair, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Output [batch, queries, D] and log-sum-exp [batch, queries], both float64."""
    found = scores(q, past[0], present[0], scale, causal)
    values = torch.cat((past[1].double(), present[1].double()), 1)
    return found.softmax(-1) @ values, found.logsumexp(-1)


def received(q: Tensor, past: Tensor, k: Tensor, scale: float, power: int, causal: bool = False) -> Tensor:
    """float64 [batch, length + tokens]: mean over the queries of the probability's power."""
    return scores(q, past, k, scale, causal).softmax(-1).pow(power).mean(1)


def agrees(found: Pair, q: Tensor, past: Pair, present: Pair, scale: float, causal: bool) -> None:
    """Assert that an output and a log-sum-exp are those of `attention`, up to `rounding`."""
    for part, expected, bound in zip(
        found, attention(q, past, present, scale, causal), rounding(q, past, present, scale), strict=True
    ):
        excess = (part.double() - expected).abs() / bound
        assert excess.max() <= 1, excess.max()


def rounding(q: Tensor, past: Pair, present: Pair, scale: float) -> tuple[Tensor, Tensor]:
    """Error bounds of float32 arithmetic, for the output [batch, queries, 1] and the log-sum-exp [batch, queries].

    A logit is a sum of products: as exact as those are large. Its error multiplies the probability, and so the values.
    Probabilities are rounded to q's dtype before they meet the values, and the output once more.
    A log-sum-exp is rounded in both bases and at every step between.
    """
    logit = scores(q.abs(), past[0].abs(), present[0].abs(), abs(scale)).amax(-1)
    logit = torch.finfo(torch.float32).eps * (1 + logit)
    largest = torch.cat((past[1], present[1]), 1).double().abs().amax((1, 2))[:, None]
    return ((logit + torch.finfo(q.dtype).eps) * largest)[..., None], 4 * logit
