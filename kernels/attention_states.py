"""Attentions over parts of the keys made one (Hard-KV, appendix F; FlashInfer, arXiv:2501.01005)."""

import torch
from torch import Tensor


def merge_states(outputs: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attentions over disjoint sets of keys into that over all of them, in any order.

    A state of the empty set is (0, -inf), and merging such states alone gives it again.

    Args:
        outputs: float32 [sets, batch, rows, queries, D].
        lse: log-sum-exp of the scores, float32 [sets, batch, rows, queries], in nats.

    Returns:
        The output [batch, rows, queries, D] and the log-sum-exp [batch, rows, queries], float32.
    """
    if outputs.is_cuda:
        from kvbench.kernels.triton.softmax import merge_shares

        out = torch.empty_like(outputs[0])
        return out, merge_shares(outputs.contiguous(), lse.contiguous(), out)
    top = lse.amax(0)
    top = top.masked_fill(top == -torch.inf, 0)
    weights = (lse - top).exp()
    total = weights.sum(0)
    out = (weights[..., None] * outputs).sum(0) / total.where(total > 0, 1)[..., None]
    return out, top + total.log()
