"""Attention over the cached slots alone, and with the present as a second part by torch's fused attention.

Most of what a pruned layer computes at a late scale is the present, which all rows see whole: a kernel for rows of
unequal length has nothing to add there, and the fused ones are faster. Rows of equal length they can read as well.
"""

import torch
from torch import Tensor

from kvbench.kernels.attention_states import State, attend_nothing, merge_pair
from kvbench.kernels.fused_attention import Backend, fused_attention
from kvbench.kernels.layout import Past, fold_rows, view_group
from kvbench.kernels.varlen_attention import Library, varlen_attention

LONG = 1024
"""Slots of equally long rows from which on fused attention is worth a second output that is merged with the first."""

PIECE_BYTES = 128 << 20
"""Bytes of that second output that exist at a time, in whole sequences."""


def attend_past(q: Tensor, past: Past, scale: float, state: State | None = None) -> State:
    """Attend to each row's own cached slots.

    Args:
        q: [sequences, heads, queries, D].
        past: stored keys and values of as many rows as there are sequences x heads, in that order.
        scale: factor on q k^T, positive.
        state: attention of the same queries over other keys, which is overwritten.

    Returns:
        Attention over the slots and the keys of `state`, in its dtype. Without one the output is float32, so that
        attention over other keys may join it before it is rounded; rows that hold nothing have (0, -inf).
    """
    layout = past.layout
    if not layout.total:
        return attend_nothing(q.float()) if state is None else state
    if q.is_cuda:
        from kvbench.kernels.triton.past_attention import past_attention_triton

        return past_attention_triton(q, past, scale, state=state)
    rows = fold_rows(q, len(past.keys), len(layout.counts)).index_select(1, layout.order).float()
    out, lse = attend_nothing(rows)
    first = 0
    for group in layout.groups:
        at, first = slice(first, first + group.size), first + group.size
        if group.length:
            keys, values = (view_group(x, group).to(q.dtype).float() for x in past[:2])
            out[:, at], lse[:, at] = fused_attention(rows[:, at], keys, values, scale)
    found = (
        out.index_select(1, layout.places).view(q.shape),
        lse.index_select(1, layout.places).view(q.shape[:3]),
    )
    return found if state is None else merge_pair(state, found)


def attend_in_parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past: Past,
    scale: float,
    *,
    causal: bool = False,
    backend: Backend | None = None,
    library: Library | None = None,
    dtype: torch.dtype | None = None,
) -> State:
    """Return what `kernels.ragged_attention.ragged_attention` does, the present by fused attention.

    Long rows of one length are read by fused attention too, others by the kernel that reads rows where they lie, or by
    a library. Parts are joined in float32. Libraries round their output to q's dtype before: 16 bits are rounded to
    once for each part that a library attends to, and once at the end (`python -m benchmarks rounding` measures it).

    Args:
        q: [sequences, heads, queries, D].
        k: current keys [sequences, heads, tokens, D].
        v: current values, shaped like `k`.
        past: stored keys and values, see `attend_past`.
        scale: factor on q k^T, positive.
        causal: current tokens are seen by themselves and those after them; else by all.
        backend: whose fused attention; None for the fastest.
        library: whose variable-length attention reads the past; None for none.
        dtype: of the output; None for q's.
    """
    layout, (out, lse) = past.layout, fused_attention(q, k, v, scale, causal=causal, backend=backend)
    state = out.to(dtype or q.dtype), lse
    if library is not None:
        return merge_pair(state, varlen_attention(q, past, scale, library)) if layout.total else state
    if layout.longest < LONG or not layout.uniform:
        return attend_past(q, past, scale, state)
    keys, values = (
        view_group(x, layout.groups[0]).to(q.dtype).reshape(*q.shape[:2], layout.longest, -1)
        for x in past[:2]
    )
    out, lse = state
    some = max(1, PIECE_BYTES // out[0].nbytes)
    for first in range(0, len(q), some):
        at = slice(first, first + some)
        found = fused_attention(q[at], keys[at], values[at], scale, backend=backend)
        merge_pair((out[at], lse[at]), found)
    return state
