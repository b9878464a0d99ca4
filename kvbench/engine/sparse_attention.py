"""Sparse attention to the slots that a method selected among past and present."""

from typing import NamedTuple

from torch import Tensor

from kvbench.engine.schedule import call_select_attended
from kvbench.engine.view import CacheView
from kvbench.kernels.layout import Past, arrange_rows, pack_rows
from kvbench.kernels.ragged_attention import ragged_attention
from kvbench.methods.shared.base import Method


class SparseAttention(NamedTuple):
    """Result of attention to selected slots.

    Attributes:
        out: output, shaped like the queries.
        copied: bytes of the copies that attention reads.
        cached: number of selected slots of each row that were in the cache before the new tokens.
    """

    out: Tensor
    copied: int
    cached: list[int]


def attend_sparsely(method: Method, q: Tensor, view: CacheView, scale: float) -> SparseAttention | None:
    """Attend to copies of the slots that the method selects; None if it selects all. Every row needs at least one.

    Args:
        method: method that selects the slots.
        q: queries [sequences, heads, queries, D].
        view: the layer right after the segment, or after a part of it.
        scale: factor on q k^T.
    """
    chosen = call_select_attended(method, view)
    if chosen is None:
        return None
    chosen = chosen & (view.position >= 0)
    counts = chosen.sum(1).tolist()
    layout = arrange_rows(pack_rows(view.position, chosen, -1, max(counts)), counts)
    rank, slot = chosen[layout.order].nonzero(as_tuple=True)
    source = layout.order[rank] * chosen.shape[1] + slot
    cached = view.cached_keys(), view.cached_values()
    keys, values = (x.flatten(0, 1)[source][None] for x in cached)
    nothing = keys[:, None, :0].expand(-1, len(counts), -1, -1)  # current tokens are among the slots
    q_rows = q.reshape(1, len(counts), *q.shape[2:])
    out, _ = ragged_attention(q_rows, nothing, nothing, Past(keys, values, layout), scale)
    # In a causal segment one token is new, and the view ends with it.
    first_new = view.segment.end - (1 if view.segment.causal else view.segment.length)
    read = (chosen & (view.position < first_new)).sum(1).tolist()
    return SparseAttention(out.reshape(q.shape), sum(x.nbytes for x in (*cached, keys, values)), read)
