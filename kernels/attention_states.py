"""Merging of attention over disjoint sets of keys (Hard-KV, appendix F; FlashInfer, arXiv:2501.01005)."""

import torch
from torch import Tensor

from kvbench.kernels.layout import State


def empty_state(q: Tensor) -> State:
    """Return the state of queries [sequences, heads, queries, D] without keys.

    It is (0, -inf). Libraries differ: FlashAttention-2 returns a log-sum-exp of +inf, FlashAttention-3 of -inf.
    """
    return torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32)


def merge_pair(first: State, second: State) -> State:
    """Merge attention over other keys into a first state, which is overwritten and returned in its dtype and strides.

    The order does not matter. The merge of two states without keys, (0, -inf), is (0, -inf).

    Args:
        first: attention over some keys.
        second: attention of the same queries over other keys, with any dtype and strides.
    """
    (out, lse), (more, more_lse) = first, second
    if out.is_cuda:
        from kvbench.kernels.triton.softmax import merge_pair_triton

        merge_pair_triton(out, lse, more, more_lse)
        return first
    sums = torch.stack((lse, more_lse))
    top = sums.amax(0)
    top = top.masked_fill(top == -torch.inf, 0)
    weights = (sums - top).exp()
    total = weights.sum(0)
    merged = (weights[..., None] * torch.stack((out.float(), more.float()))).sum(0)
    return out.copy_(merged / total.where(total > 0, 1)[..., None]), lse.copy_(top + total.log())
