"""Attention over the low-bit slots of a plane, decoded in registers or piece by piece.

On CUDA one kernel decodes codes tile by tile. Elsewhere slots are decoded in pieces that fit the processor's cache, and
torch attends to them. The result is a state, output and log-sum-exp, that can be merged with attention over other keys
(`kernels/attention_states.py`).
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvbench.kernels.attention_choices import AttentionChoice, note_choice
from kvbench.kernels.attention_states import merge_pair, merge_states
from kvbench.kernels.hadamard import rotate_channels
from kvbench.kernels.layout import Group, State
from kvbench.kernels.planes import Plane, read_stored
from kvbench.kernels.ragged_attention import PIECE_BYTES, dense_attention


def quantised_attention(q: Tensor, plane: Plane, scale: float, state: State | None = None) -> State:
    """Attend from every query to all slots of its row; decoded numbers are rounded to q's dtype.

    Rotated vectors (`Codes.gain`) are not rotated back: queries, or the output, are rotated in their place.
    If q has more sequences than the plane, sequence b reads sequence b % stored. On CUDA, D is a multiple of 8 and at
    most 256, and tensors of the plane are contiguous; a complex32 rotation halves the bytes that are read of it.

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

        return quantised_attention_triton(q, plane, scale, state, dtype=dtype)
    result = _attend_in_pieces(q, plane, scale, dtype)
    return result if state is None else merge_pair(state, result)


def _attend_in_pieces(q: Tensor, plane: Plane, scale: float, dtype: torch.dtype | None) -> State:
    """Attend with torch; arguments and results as in `_attend_stored` without a state."""
    stored, layout = len(plane.keys.numbers), plane.layout
    # Sequences that read the same keys become queries of one sequence; rows are in storage order.
    folded = q.unflatten(0, (-1, stored)).movedim(0, 2).flatten(2, 3).index_select(1, layout.order)
    out, lse = (
        torch.zeros_like(folded, dtype=dtype),
        folded.new_full(folded.shape[:3], -torch.inf, dtype=torch.float32),
    )
    first = 0
    for group in layout.groups:
        for sequences, rows, pieces in _list_pieces(group, stored, PIECE_BYTES // (8 * q.shape[3])):
            at = sequences, slice(first + rows.start, first + rows.stop)
            states = [_attend_slots(folded[at], plane, sequences, slots, scale) for slots in pieces]
            out[at], lse[at] = states[0] if len(states) == 1 else _merge(states)
        first += group.size
    unfolded = (x.index_select(1, layout.places).unflatten(2, (-1, q.shape[2])) for x in (out, lse))
    out, lse = (x.movedim(2, 0).flatten(0, 1) for x in unfolded)
    return out, lse


def _merge(states: Sequence[State]) -> State:
    """Merge states of any floating dtype, in float32."""
    outputs, sums = zip(*states, strict=True)
    return merge_states(torch.stack([out.float() for out in outputs]), torch.stack(sums))


def _list_pieces(group: Group, batch: int, max_slots: int) -> Iterator[tuple[slice, slice, list[slice]]]:
    """Yield sequences, rows of a group, and their slices of the flat buffer, `max_slots` at a time."""
    if not group.length:
        return
    step = max(1, min(batch, max_slots // group.length))
    rows = max(1, min(group.size, max_slots // (group.length * step)))
    for sequence in range(0, batch, step):
        for row in range(0, group.size, rows):
            stop = min(row + rows, group.size)
            start, end = (group.start + at * group.length for at in (row, stop))
            size = end - start if step * (end - start) <= max_slots else max_slots
            pieces = [slice(at, min(at + size, end)) for at in range(start, end, size)]
            yield slice(sequence, min(sequence + step, batch)), slice(row, stop), pieces


def _attend_slots(q: Tensor, plane: Plane, sequences: slice, slots: slice, scale: float) -> State:
    """Attend from q [sequences, rows, queries, D] to contiguous slots, the same number in each row."""
    keys, values = (
        x.unflatten(1, (q.shape[1], -1)).to(q.dtype) for x in read_stored(plane, sequences, slots)
    )
    out, lse = dense_attention(q, keys, values, scale, lse=True)
    assert lse is not None
    return out, lse
