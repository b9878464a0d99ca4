"""Attention over the slots of a plane, which are stored in few bits: numbers exist in registers or piece by piece.

On CUDA one kernel turns codes into numbers on their way to the products. Elsewhere as many slots are read back at a
time as stay in the cache, and torch attends to them. Either way the result is a state: an output and a log-sum-exp, to
be merged with attention over other keys (`kernels/attention_states.py`).
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvbench.kernels.attention_choices import Choice, note_choice
from kvbench.kernels.attention_states import State, merge_pair, merge_states
from kvbench.kernels.layout import Group
from kvbench.kernels.planes import Plane, read_plane
from kvbench.kernels.ragged_attention import PIECE_BYTES, dense_attention


def quantised_attention(q: Tensor, plane: Plane, scale: float, state: State | None = None) -> State:
    """Attend from every query to all slots of its row, numbers rounded to q's dtype as they are read.

    Sequences beyond those that the plane stores read them again: sequence b reads b % stored. On CUDA, D is a multiple
    of 8 and at most 256, and tensors of the plane are contiguous; the rotation may be complex32 there, which is half of
    what is read of it.

    Args:
        q: [batch, rows, queries, D] of any strides, rotated by position; batch is a multiple of the plane's.
        plane: what is attended to.
        scale: factor on q k^T, positive.
        state: attention of the same queries over other keys, which takes this one in: it is overwritten and returned.

    Returns:
        The output [batch, rows, queries, D], in q's dtype if there was no state, and the log-sum-exp.
    """
    note_choice(lambda: Choice("codes", (("libraries", "read no codes"),)))
    if q.is_cuda:
        from kvbench.kernels.triton.quantised_attention import quantised_attention_triton

        return quantised_attention_triton(q, plane, scale, state)
    found = _attend_in_pieces(q, plane, scale)
    return found if state is None else merge_pair(state, found)


def _attend_in_pieces(q: Tensor, plane: Plane, scale: float) -> State:
    """Attend by torch; arguments and results as of `quantised_attention` without a state."""
    stored, layout = len(plane.keys.numbers), plane.layout
    # All that read the same keys become queries of one sequence, and rows come in the order of the storage.
    asked = q.unflatten(0, (-1, stored)).movedim(0, 2).flatten(2, 3).index_select(1, layout.order)
    out, lse = torch.zeros_like(asked), asked.new_full(asked.shape[:3], -torch.inf, dtype=torch.float32)
    first = 0
    for group in layout.groups:
        for sequences, rows, parts in _cut(group, stored, PIECE_BYTES // (8 * q.shape[3])):
            at = sequences, slice(first + rows.start, first + rows.stop)
            states = [_attend_slots(asked[at], plane, sequences, slots, scale) for slots in parts]
            out[at], lse[at] = states[0] if len(states) == 1 else _merge(states)
        first += group.size
    found = (x.index_select(1, layout.places).unflatten(2, (-1, q.shape[2])) for x in (out, lse))
    out, lse = (x.movedim(2, 0).flatten(0, 1) for x in found)
    return out, lse


def _merge(states: Sequence[State]) -> State:
    """Merge states of any floating dtype in float32."""
    outputs, sums = zip(*states, strict=True)
    return merge_states(torch.stack([out.float() for out in outputs]), torch.stack(sums))


def _cut(group: Group, batch: int, max_slots: int) -> Iterator[tuple[slice, slice, list[slice]]]:
    """Yield sequences, rows of a group, and the parts of the flat buffer with their slots, `max_slots` at a time."""
    if not group.length:
        return
    step = max(1, min(batch, max_slots // group.length))
    rows = max(1, min(group.size, max_slots // (group.length * step)))
    for sequence in range(0, batch, step):
        for row in range(0, group.size, rows):
            stop = min(row + rows, group.size)
            start, end = (group.start + at * group.length for at in (row, stop))
            size = end - start if step * (end - start) <= max_slots else max_slots
            parts = [slice(at, min(at + size, end)) for at in range(start, end, size)]
            yield slice(sequence, min(sequence + step, batch)), slice(row, stop), parts


def _attend_slots(q: Tensor, plane: Plane, sequences: slice, slots: slice, scale: float) -> State:
    """Attend from q [sequences, rows, queries, D] to slots that lie row after row, as many of each row."""
    keys, values = (x.unflatten(1, (q.shape[1], -1)).to(q.dtype) for x in read_plane(plane, sequences, slots))
    out, lse = dense_attention(q, keys, values, scale, lse=True)
    assert lse is not None
    return out, lse
