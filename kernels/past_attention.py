"""Attention to the cached slots, alone or merged with torch's fused attention to the current segment.

At a late scale of a pruned layer most of the work is attention to the current segment, which all rows see in full:
fused kernels are faster there than a kernel for rows of unequal length. They can also read rows of equal length.
"""

import torch
from torch import Tensor

from kvbench.kernels.attention_states import empty_state, merge_pair
from kvbench.kernels.fused_attention import fused_attention
from kvbench.kernels.layout import Past, State, fold_rows, view_group
from kvbench.kernels.varlen_attention import Library, varlen_attention

MIN_FUSED_SLOTS = 1024
"""Minimum slots of equally long rows at which fused attention is worth a second output and its merge."""

PIECE_BYTES = 128 << 20
"""Maximum bytes of the second output that exist at once, in whole sequences."""


def attend_past(q: Tensor, past: Past, scale: float, state: State | None = None) -> State:
    """Attend to each row's own cached slots.

    Args:
        q: [sequences, heads, queries, D].
        past: stored keys and values; its rows are the sequences x heads, in that order.
        scale: factor on q k^T, positive.
        state: attention of the same queries over other keys, which is overwritten.

    Returns:
        Attention over the slots and the keys of `state`, in its dtype. Without a state the output is float32, so that
        it can be merged before it is rounded; empty rows have (0, -inf).
    """
    layout = past.layout
    if not layout.total:
        return empty_state(q.float()) if state is None else state
    if q.is_cuda:
        from kvbench.kernels.triton.past_attention import past_attention_triton

        return past_attention_triton(q, past, scale, state)
    rows = fold_rows(q, len(past.keys), len(layout.counts)).index_select(1, layout.order).float()
    out, lse = empty_state(rows)
    first = 0
    for group in layout.groups:
        at, first = slice(first, first + group.size), first + group.size
        if group.length:
            keys, values = (view_group(x, group).to(q.dtype).float() for x in past[:2])
            out[:, at], lse[:, at] = fused_attention(rows[:, at], keys, values, scale)
    result = (
        out.index_select(1, layout.places).view(q.shape),
        lse.index_select(1, layout.places).view(q.shape[:3]),
    )
    return result if state is None else merge_pair(state, result)


def attend_in_parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past: Past,
    scale: float,
    *,
    causal: bool = False,
    library: Library | None = None,
    dtype: torch.dtype | None = None,
) -> State:
    """Compute `kernels.ragged_attention.ragged_attention` with fused attention to the current segment.

    Fused attention also reads long rows of one length; a kernel or a library reads other rows in place. Parts are
    merged in float32. Libraries first round their output to q's dtype, so 16-bit outputs are rounded once for each part
    of a library and once at the end (docs/laboratory.md, "Rounding in parts").

    It takes the arguments of `ragged_attention`; `library` is the variable-length attention that reads the past.
    """
    layout, (out, lse) = past.layout, fused_attention(q, k, v, scale, causal=causal)
    state = out.to(dtype or q.dtype), lse
    if library is not None:
        return merge_pair(state, varlen_attention(q, past, scale, library)) if layout.total else state
    if layout.longest < MIN_FUSED_SLOTS or not layout.uniform:
        return attend_past(q, past, scale, state)
    keys, values = (
        view_group(x, layout.groups[0]).to(q.dtype).reshape(*q.shape[:2], layout.longest, -1)
        for x in past[:2]
    )
    out, lse = state
    step = max(1, PIECE_BYTES // out[0].nbytes)
    for first in range(0, len(q), step):
        at = slice(first, first + step)
        merge_pair((out[at], lse[at]), fused_attention(q[at], keys[at], values[at], scale))
    return state
