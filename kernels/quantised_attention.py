"""Attention over the low-bit slots of a plane.

On CUDA one kernel decodes codes tile by tile, in registers. Elsewhere all slots are decoded first. The result is a
state, output and log-sum-exp, that can be merged with attention over other keys (`kernels/attention_states.py`).
"""

import torch
from torch import Tensor

from kvbench.kernels.attention_choices import AttentionChoice, note_choice
from kvbench.kernels.attention_states import merge_pair
from kvbench.kernels.hadamard import rotate_channels
from kvbench.kernels.layout import Past, State
from kvbench.kernels.past_attention import attend_past
from kvbench.kernels.planes import Plane, read_stored


def quantised_attention(q: Tensor, plane: Plane, scale: float, state: State | None = None) -> State:
    """Attend from every query to all slots of its row; decoded keys and values are rounded to q's dtype.

    Rotated vectors (`Codes.gain`) are not rotated back: queries, or the output, are rotated in their place.
    If q has more sequences than the plane, sequence b reads sequence b % stored. On CUDA, D is a multiple of 8 and at
    most 256, and tensors of the plane are contiguous; a complex32 rotation halves the bytes that are read.

    Args:
        q: [batch, rows, queries, D] with any strides, rotated by position; batch is a multiple of the plane's.
        plane: stored keys and values.
        scale: factor on q k^T, positive.
        state: attention of the same queries over other keys; it is merged, overwritten and returned.

    Returns:
        The output [batch, rows, queries, D], in q's dtype without a state, and the log-sum-exp.
    """
    note_choice(lambda: AttentionChoice("codes", (("libraries", "read no codes"),)))
    if plane.keys.gain is not None:
        q = rotate_channels(q).to(q.dtype)
    if plane.values.gain is not None:
        out, lse = _attend_stored(q, plane, scale, None, torch.float32)
        out = rotate_channels(out)
        return (out.to(q.dtype), lse) if state is None else merge_pair(state, (out, lse))
    return _attend_stored(q, plane, scale, state)


def _attend_stored(
    q: Tensor, plane: Plane, scale: float, state: State | None, dtype: torch.dtype | None = None
) -> State:
    """Attend as `quantised_attention`; queries and output are rotated as the plane's keys and values are.

    Without a state, the output has `dtype`, or q's.
    """
    if q.is_cuda:
        from kvbench.kernels.triton.quantised_attention import quantised_attention_triton

        return quantised_attention_triton(q, plane, scale, state, dtype)
    # Sequence b reads sequence b % stored.
    keys, values = (x.repeat(len(q) // len(x), 1, 1) for x in read_stored(plane))
    out, lse = attend_past(q, Past(keys, values, plane.layout), scale)
    result = out.to(dtype or q.dtype), lse
    return result if state is None else merge_pair(state, result)
