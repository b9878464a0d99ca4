"""Ways to lay out what heads of unequal length keep: regularised, as Hard-KV does for its CUDA graphs, and ragged.

Source: Hard-KV, section 3.3 and appendix B.2. A captured graph reads the same slots in all layers, so that a layout
has to make layers alike, and heads too where one launch reads them all. Sparse loading leaves all slots where they are
and masks them (the paper's Sparse); rewriting moves what is kept to the front of as many slots as the longest head of
any layer needs (Max). The paper's tasks are selections that have more or less in common along heads and layers, laid
out by one of the two. The engine's layout allocates what is kept and nothing else; its rows lie behind each other, and
those of one length are read together (`kernels/layout.py`).

All three are rows of a `Layout`, of N slots, of the longest row's, and of each row's own, with as much room behind each
row for the tokens that follow. Rows are (request, KV head), requests first.
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
"""Slots stay where they are under a mask, are rewritten to equally long rows, or to rows of what each keeps."""


class Cost(NamedTuple):
    """Costs of a layout.

    Attributes:
        memory: slots or bytes that are allocated.
        prepare: seconds of the preparation of all layers.
        step: seconds of a step's attention in all layers.
    """

    memory: float
    prepare: float
    step: float


def pack_bits(mask: Tensor) -> Tensor:
    """Pack a mask bool [..., slots] into bytes uint8 [..., ceil(slots / 8)], the first slot in the lowest bit."""
    bits = F.pad(mask, (0, -mask.shape[-1] % 8)).unflatten(-1, (-1, 8)).byte()
    return (bits << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, slots: int) -> Tensor:
    """Return the mask bool [..., slots] that was packed."""
    bits = packed[..., None] >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.flatten(-2)[..., :slots].bool()


def count_slots(keep: Tensor, way: Way) -> int:
    """Return the slots that stay allocated for a selection bool [layers, requests, heads, slots].

    Under masks an index of a head is a slot in every layer, so that it is released only if no layer of that head keeps
    it. Rewritten, every row has as many slots as its request's longest.
    """
    if way == "sparse":
        return len(keep) * int(keep.any(0).sum())
    return len(keep) * sum(find_widths(keep)) if way == "max" else int(keep.sum())


def find_widths(keep: Tensor) -> list[int]:
    """Return the most that any layer and head of each row's request keeps of bool [layers, requests, heads, slots]."""
    return keep.sum(3).amax((0, 2)).repeat_interleave(keep.shape[2]).tolist()


def find_utilisation(lengths: Tensor) -> float:
    """Return sparsity utilisation: the mean over the largest of lengths [layers, heads] (Table 3, Figure 9)."""
    return float(lengths.double().mean() / lengths.max())


def integrate(memory: float, prepare: float, step: float, steps: int = 128) -> float:
    """Return memory x (preparation + steps x step), the memory-time integral over one interval (appendix B.2).

    Args:
        memory: slots or bytes that are allocated.
        prepare: seconds of the preparation.
        step: seconds of a step.
        steps: of an interval.
    """
    return memory * (prepare + steps * step)


def break_even(first: Cost, second: Cost) -> tuple[float, float]:
    """Return after how many steps `second`, prepared anew, is ahead of `first`: in time, and in memory x time.

    0 where it is from the start, infinity where it never is.
    """
    found = []
    for one, other in ((1.0, 1.0), (first.memory, second.memory)):
        behind = other * second.prepare - one * first.prepare
        gained = one * first.step - other * second.step
        found.append(0.0 if behind <= 0 else behind / gained if gained > 0 else float("inf"))
    return found[0], found[1]


class Regular(NamedTuple):
    """One layer's rows in a layout that a mask goes with.

    Attributes:
        rows: storage and where rows lie, those of one width together.
        bits: uint8 [rows, ceil(longest / 8)], what is kept of each row's slots, the first slot in the lowest bit.
        masks: added to the scores of every group of rows, 0 or -inf, float32 [1, rows, 1, width + room]; None where
            all slots of the group are kept.
    """

    rows: DecodeRows
    bits: Tensor
    masks: tuple[Tensor | None, ...]


def lay_dense(rows: int, slots: int, room: int) -> Layout:
    """Return the layout of rows that hold tokens 0 to slots - 1 each, with `room` behind."""
    return arrange_rows(torch.arange(slots).repeat(rows, 1), [slots] * rows, room)


def lay(
    way: Way, keys: Tensor, values: Tensor, layout: Layout, keep: Tensor, widths: Sequence[int]
) -> Regular | DecodeRows:
    """Prepare what a layer keeps for the steps of an interval.

    Args:
        way: where it comes to lie.
        keys: flat storage [1, capacity, D]; masks leave it where it is.
        values: of the same shape.
        layout: where rows lie in both (`lay_dense`).
        keep: bool [rows, slots].
        widths: slots of every row if it is rewritten as all layers are (`find_widths`).
    """
    if way == "ragged":  # as the engine does
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
    # As a kernel reads them: torch's attention adds a mask of numbers to the scores.
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
    """Store a new token a row, and let it attend to what its row keeps, the tokens after that, and itself.

    Args:
        q: [1, rows, query heads per KV head, D].
        k: key of the new token [1, rows, 1, D].
        v: its value, shaped like k.
        layer: written to.
        filled: tokens of the interval before it.
        scale: factor on q k^T.

    Returns:
        [1, rows, query heads per KV head, D].
    """
    if isinstance(layer, DecodeRows):
        return decode_attention(q, k, v, layer, filled, scale)
    rows, layout = layer.rows, layer.rows.past.layout
    write_tokens(k, v, rows, filled)
    parts = [q]
    if len(layout.groups) > 1:
        parts = list(q.index_select(1, layout.order).split([group.size for group in layout.groups], 1))
    found = []
    for part, (keys, values), mask, group in zip(parts, rows.groups, layer.masks, layout.groups, strict=True):
        end = group.length + filled + 1
        seen = None if mask is None else mask[..., :end]
        pair = keys[:, :, :end], values[:, :, :end]
        found.append(F.scaled_dot_product_attention(part, *pair, attn_mask=seen, scale=scale))
    return found[0] if len(found) == 1 else torch.cat(found, 1).index_select(1, layout.places)
