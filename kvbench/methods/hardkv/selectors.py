"""Hard-KV's selectors, which alter scores before the softmax (Hard-KV, section 4 and appendix E)."""

from typing import Literal

import torch
from torch import Tensor

from kvbench.methods.shared.select import smooth

Selector = Literal["vanilla", "snapkv", "rkv"]
EPSILON = 1e-10
"""Added before a logarithm, as in the released code."""


def pool_scores(scores: Tensor, exists: Tensor, kernel: int) -> Tensor:
    """Give every slot the largest score among its neighbours (SnapKV, before the softmax).

    `kernel` is the odd window of the maximum in slots, and invalid slots (`exists`, bool [rows, slots]) are not
    neighbours. Scores and result are float32 [rows, queries, slots], -inf for invalid slots.
    """
    rows, queries, _ = scores.shape
    pooled = smooth(scores.flatten(0, 1), "max", kernel, exists.repeat_interleave(queries, 0))
    return pooled.unflatten(0, (rows, queries)).masked_fill(~exists[:, None], -torch.inf)


def weigh_redundancy(scores: Tensor, exists: Tensor, redundancy: Tensor, mix: float) -> Tensor:
    """Return log of lambda P - (1 - lambda) R, shifted to start at 0 and normalised (R-KV; Solution 2).

    R is `redundancy`, float32 [rows, slots] (`redundancy.measure_redundancy`), and lambda is `mix`. Scores and result
    are float32 [rows, queries, slots], -inf for invalid slots; `exists` is bool [rows, slots].
    """
    mixed = mix * scores.softmax(-1) - (1 - mix) * redundancy[:, None]
    smallest = mixed.masked_fill(~exists[:, None], torch.inf).amin(-1, keepdim=True)
    shifted = (mixed - smallest).masked_fill(~exists[:, None], 0)
    weights = shifted / shifted.sum(-1, keepdim=True).clamp(min=EPSILON)
    return (weights + EPSILON).log().masked_fill(~exists[:, None], -torch.inf)
