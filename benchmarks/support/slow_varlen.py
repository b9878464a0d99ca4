"""Stand-in for torch's variable-length attention: sequence by sequence, in double precision."""

from itertools import pairwise

import torch
from torch import Tensor

POISON = 7.0
"""Output of a sequence without keys, which callers must not read."""


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
