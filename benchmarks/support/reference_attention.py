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


def agrees(
    found: tuple[Tensor, Tensor | None], q: Tensor, past: Pair, present: Pair, scale: float, causal: bool
) -> None:
    """Assert that an output, and a log-sum-exp if there is one, equal `attention`, up to `rounding`."""
    for part, expected, bound in zip(
        found, attention(q, past, present, scale, causal), rounding(q, past, present, scale), strict=True
    ):
        if part is not None:
            excess = (part.double() - expected).abs() / bound
            assert excess.max() <= 1, excess.max()


def rounding(q: Tensor, past: Pair, present: Pair, scale: float) -> tuple[Tensor, Tensor]:
    """Return error bounds of float32 arithmetic, for the output [batch, queries, 1] and log-sum-exp [batch, queries].

    The error of a logit grows with the size of its products; it scales the probability, and so the values.
    Probabilities are rounded to q's dtype before the product with the values, and the output is rounded again.
    A log-sum-exp is rounded in both bases and at every step in between.
    """
    logit = scores(q.abs(), past[0].abs(), present[0].abs(), abs(scale)).amax(-1)
    logit = torch.finfo(torch.float32).eps * (1 + logit)
    largest = torch.cat((past[1], present[1]), 1).double().abs().amax((1, 2))[:, None]
    return ((logit + torch.finfo(q.dtype).eps) * largest)[..., None], 4 * logit
