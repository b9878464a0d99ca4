"""Layouts of kept slots of heads of unequal length: regular as in Hard-KV, for CUDA graphs, and ragged.

Source: Hard-KV, section 3.3 and appendix B.2. A captured graph reads the same slots in all layers, so a layout must
make layers equal, and heads too if one launch reads them all. Sparse loading masks slots in place (the paper's Sparse);
rewriting moves kept slots to the front of rows of the longest length over heads and layers (Max). The paper's tasks are
selections that are shared along heads or layers to different degrees, in one of the two layouts. The engine's layout
allocates only kept slots, row after row, and reads rows of one length together (`kernels/layout.py`).

All three are rows of a `Layout`, with N slots, the slots of the longest row, or the slots of each row, and the same
number of free slots after each row. Rows are (request, KV head), requests first.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.kernels.compact import move_slots, source_table
from kvbench.kernels.decode_attention import DecodeRows, decode_attention, prepare_rows, write_tokens
from kvbench.kernels.layout import Layout, Past, arrange_rows, pack_rows

Way = Literal["sparse", "max", "ragged"]
"""Slots are masked in place, rewritten to equally long rows, or rewritten to rows of their own length."""


class Cost(NamedTuple):
    """Slots or bytes of a layout, seconds to prepare all layers, and seconds of a step's attention in all layers."""

    memory: float
    prepare: float
    step: float


def pack_bits(mask: Tensor) -> Tensor:
    """Pack a mask bool [..., slots] into bytes uint8 [..., ceil(slots / 8)], the first slot in the lowest bit."""
    bits = F.pad(mask, (0, -mask.shape[-1] % 8)).unflatten(-1, (-1, 8)).byte()
    return (bits << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, slots: int) -> Tensor:
    """Unpack a mask bool [..., slots]."""
    bits = packed[..., None] >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.flatten(-2)[..., :slots].bool()


def count_slots(keep: Tensor, way: Way) -> int:
    """Return the allocated slots for kept slots bool [layers, requests, heads, slots].

    With masks, a slot index of a head exists in every layer and is freed only if no layer keeps it. Rewritten rows have
    the length of the longest row of their request.
    """
    if way == "sparse":
        return len(keep) * int(keep.any(0).sum())
    return len(keep) * sum(find_widths(keep)) if way == "max" else int(keep.sum())


def find_widths(keep: Tensor) -> list[int]:
    """Return for each row the largest number of kept slots in any layer and head of its request."""
    return keep.sum(3).amax((0, 2)).repeat_interleave(keep.shape[2]).tolist()


def find_utilisation(lengths: Tensor) -> float:
    """Return sparsity utilisation: the mean over the largest of lengths [layers, heads] (Table 3, Figure 9)."""
    return float(lengths.double().mean() / lengths.max())


def integrate(memory: float, prepare: float, step: float, steps: int = 128) -> float:
    """Return memory x (preparation + steps x step), the memory-time integral over one interval (appendix B.2)."""
    return memory * (prepare + steps * step)


def break_even(first: Cost, second: Cost) -> tuple[float, float]:
    """Return the steps after which `second`, including its preparation, beats `first` in time and in memory x time.

    0 if it does from the start, infinity if it never does.
    """
    steps = []
    for one, other in ((1.0, 1.0), (first.memory, second.memory)):
        debt = other * second.prepare - one * first.prepare
        gain = one * first.step - other * second.step
        steps.append(0.0 if debt <= 0 else debt / gain if gain > 0 else float("inf"))
    return steps[0], steps[1]


class Regular(NamedTuple):
    """One layer's rows in a masked layout.

    Attributes:
        rows: storage and layout, with rows of one width together.
        bits: uint8 [rows, ceil(longest / 8)], mask of kept slots, the first slot in the lowest bit.
        masks: additive mask of every group of rows, 0 or -inf, float32 [1, rows, 1, width + free_slots]; None if the
            group keeps all slots.
    """

    rows: DecodeRows
    bits: Tensor
    masks: tuple[Tensor | None, ...]


def lay_dense(rows: int, slots: int, free_slots: int) -> Layout:
    """Return the layout of rows with tokens 0 to slots - 1 each, and free slots after them."""
    return arrange_rows(torch.arange(slots).repeat(rows, 1), [slots] * rows, free_slots)


def lay(
    way: Way, keys: Tensor, values: Tensor, layout: Layout, keep: Tensor, widths: Sequence[int]
) -> Regular | DecodeRows:
    """Prepare the kept slots of a layer for the steps of an interval.

    Args:
        way: layout.
        keys: flat storage [1, capacity, D], not moved by masks.
        values: shaped like `keys`.
        layout: layout of both (`lay_dense`).
        keep: bool [rows, slots].
        widths: slots of every row for rewritten rows (`find_widths`).
    """
    if way == "ragged":  # as in the engine
        after, source = source_table(layout, keep, layout.longest, 0, layout.free_slots)
        return prepare_rows(Past(move_slots(keys, source), move_slots(values, source), after))
    if way == "sparse":
        return _mask_rows(prepare_rows(Past(keys, values, layout), "grouped"), keep)
    longest = max(widths)
    after = arrange_rows(pack_rows(layout.positions, keep, -1, longest), list(widths), layout.free_slots)
    source = (layout.offsets[:, None] + torch.arange(layout.longest))[keep]
    target = (after.offsets[:, None] + keep.cumsum(1) - 1)[keep]
    moved = []
    for storage in (keys, values):
        rewritten = storage.new_zeros(1, after.capacity, storage.shape[2])
        moved.append(rewritten.index_copy_(1, target, storage.index_select(1, source)))
    return _mask_rows(
        prepare_rows(Past(*moved, after), "grouped"), torch.arange(longest) < keep.sum(1, keepdim=True)
    )


def _mask_rows(rows: DecodeRows, keep: Tensor) -> Regular:
    bits, layout, masks, first = pack_bits(keep), rows.past.layout, list[Tensor | None](), 0
    # torch's attention needs an additive mask.
    kept = unpack_bits(bits, keep.shape[1]).index_select(0, layout.order)
    for group in layout.groups:
        hidden = ~kept[first : first + group.size, : group.length]
        mask = torch.zeros(1, group.size, 1, group.length + group.free_slots)
        mask[0, :, 0, : group.length].masked_fill_(hidden, -torch.inf)
        masks.append(mask if hidden.any() else None)
        first += group.size
    return Regular(rows, bits, tuple(masks))


def attend_step(
    q: Tensor, k: Tensor, v: Tensor, layer: Regular | DecodeRows, filled: int, scale: float
) -> Tensor:
    """Store a new token per row; it attends to the kept slots of its row, to later tokens, and to itself.

    Args:
        q: [1, rows, query heads per KV head, D].
        k: key of the new token [1, rows, 1, D].
        v: its value, shaped like k.
        layer: prepared rows, modified.
        filled: earlier tokens of the interval.
        scale: factor on q k^T.

    Returns:
        [1, rows, query heads per KV head, D].
    """
    if isinstance(layer, DecodeRows):
        return decode_attention(q, k, v, layer, filled, scale)
    rows, layout = layer.rows, layer.rows.past.layout
    write_tokens(k, v, rows, filled)
    queries = [q]
    if len(layout.groups) > 1:
        queries = list(q.index_select(1, layout.order).split([group.size for group in layout.groups], 1))
    outputs = []
    for x, (keys, values), mask, group in zip(queries, rows.groups, layer.masks, layout.groups, strict=True):
        end = group.length + filled + 1
        seen = None if mask is None else mask[..., :end]
        pair = keys[:, :, :end], values[:, :, :end]
        outputs.append(F.scaled_dot_product_attention(x, *pair, attn_mask=seen, scale=scale))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1).index_select(1, layout.places)
