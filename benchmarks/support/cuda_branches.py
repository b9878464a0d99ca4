"""CUDA branches on a CPU: tensors claim to be on a GPU, Triton interprets its kernels, libraries' attention is slow."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from unittest.mock import patch

import torch
from torch import Tensor

from kvbench.kernels import ragged_attention, varlen_attention
from kvbench.kernels.attention_paths import Path

POISON = 7.0
"""Output value of a sequence without keys, which callers must not read."""


@contextmanager
def on_cuda_branches(path: Path = "kernel") -> Iterator[None]:
    """Make code that checks `is_cuda` take its GPU branch.

    `TRITON_INTERPRET=1` must be set before the first import of a Triton kernel.

    Args:
        path: path of attention over past and present, which on a GPU depends on the shape.
    """
    with ExitStack() as stack:
        stack.enter_context(patch.object(Tensor, "is_cuda", property(lambda _: True)))
        stack.enter_context(patch.object(ragged_attention, "choose_path", lambda *_: path))
        stack.enter_context(patch.object(varlen_attention, "find_varlen", lambda: attend_slowly))
        stack.enter_context(
            patch.object(torch.ops.aten, "_scaled_dot_product_efficient_attention", attend_with_bias)
        )
        yield


def attend_with_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, _: bool) -> tuple[Tensor]:
    """Compute torch's GPU attention with an additive mask, for the tokens of the text."""
    scores = q.float() @ k.float().mT * q.shape[-1] ** -0.5 + bias.float()
    return ((scores.softmax(-1) @ v.float()).to(q.dtype),)


def attend_slowly(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
    scale: float, seqused_k: Tensor, num_splits: int | None = None,  # noqa: ARG001 - part of torch's signature
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Check torch's requirements and compute attention; the log-sum-exp of a sequence without keys is +inf."""
    assert query.shape[1:] == key.shape[1:] == value.shape[1:]
    assert {x.dtype for x in (cu_seq_q, cu_seq_k, seqused_k)} == {torch.int32}
    assert len(cu_seq_q) == len(cu_seq_k) == len(seqused_k) + 1
    out, lse = (
        torch.full_like(query, POISON),
        query.new_full(query.shape[:2], torch.inf, dtype=torch.float32).mT,
    )
    spans = zip(pairwise(cu_seq_q.tolist()), pairwise(cu_seq_k.tolist()), seqused_k.tolist(), strict=True)
    for (first, last), (start, stop), used in spans:
        assert 0 <= start <= start + used <= stop <= len(key)
        assert last - first <= max_q
        assert used <= max_k
        if used:
            keys, values = (x[start : start + used].double() for x in (key, value))
            scores = torch.einsum("qhd,khd->hqk", query[first:last].double(), keys) * scale
            out[first:last] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(out.dtype)
            lse[:, first:last] = scores.logsumexp(-1)
    assert cu_seq_q[0] == 0
    assert cu_seq_q[-1] == len(query)
    return out, lse
