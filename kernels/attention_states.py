"""Merging of attention over disjoint sets of keys (Hard-KV, appendix F; FlashInfer, arXiv:2501.01005)."""

import torch
from torch import Tensor

from kvbench.kernels.layout import State


def attend_nothing(q: Tensor) -> State:
    """Return the state of queries [sequences, heads, queries, D] without keys.

    Libraries differ there: FlashAttention-2 returns a log-sum-exp of +inf, FlashAttention-3 of -inf.
    """
    return torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32)


def merge_states(outputs: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention over disjoint sets of keys into attention over all keys; the order does not matter.

    The state of an empty set is (0, -inf); merging only such states returns it.

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


def merge_pair(first: State, second: State) -> State:
    """Merge attention over other keys into a first state, which is overwritten and keeps its dtype and strides.

    Args:
        first: attention over some keys.
        second: attention of the same queries over other keys, with any dtype and strides.
    """
    (out, lse), (more, more_lse) = first, second
    if out.is_cuda:
        from kvbench.kernels.triton.softmax import merge_pair_triton

        merge_pair_triton(out, lse, more, more_lse)
        return first
    merged, merged_lse = merge_states(torch.stack((out.float(), more.float())), torch.stack((lse, more_lse)))
    return out.copy_(merged), lse.copy_(merged_lse)
