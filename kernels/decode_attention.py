"""Decode attention: a few new tokens attend to each row's cached keys, earlier tokens of their segment and themselves.

The free slots after every row store the tokens of an unfinished segment (`kernels/layout.py`): a step writes its keys
and values there and reads all earlier ones in place. `prepare_rows` builds what all steps of a segment share. On CUDA
a one-token step reads its rows' offsets on the device (`RowOffsets`), so that a recorded step follows rows that move.
"""

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.kernels.attention_choices import AttentionChoice, note_choice
from kvbench.kernels.layout import Layout, Past, RowOffsets, list_free_slots, view_group

Arrangement = Literal["kernel", "together", "grouped", "padded"]
"""Arrangements of rows of unequal length (HeadKV, arXiv:2605.20600, section 4, compares similar arrangements).

`kernel`: a Triton kernel reads rows in place. Other arrangements use torch's attention. `together`: rows read all slots
under a mask. `grouped`: one call per row length. `padded`: a copy pads all rows to the longest, under a mask.
"""
MIN_ROWS_PER_LENGTH = 4
"""Minimum mean number of rows per length at which rows are read `grouped`, with a call for each length."""
MAX_TOTAL_LENGTHS = 12
"""Total slots, in multiples of the longest row, up to which rows are read `together`; above, they are `padded`."""
DECODE_KERNEL = AttentionChoice(
    "decode kernel", (("torch's attention", "reads rows of one length, or copies"),)
)
CALL_ELEMENTS = 25_000
"""Elements copied in the time of one attention call: rows are `grouped` if `padded` would copy as many per length."""


class DecodeRows(NamedTuple):
    """A layer's storage while the steps of a segment fill the free slots after its rows.

    Attributes:
        past: stored keys and values [batch, capacity, D].
        groups: keys and values of the rows of each length, views [batch, rows, length + free_slots, D], in the layout's
            order; empty if rows are read together, padded, or by a kernel.
        ends: int64 [rows], the slot after each row; None if all rows are one group.
        ages: slot minus the first free slot of a row, and the capacity for slots of other rows: int64 [rows, capacity]
            if rows are read together, [rows, 1, width] if they are padded, else None.
        slots: int64 [rows x width], slots of rows that are padded to the longest; None otherwise.
    """

    past: Past
    groups: tuple[tuple[Tensor, Tensor], ...] = ()
    ends: Tensor | None = None
    ages: Tensor | None = None
    slots: Tensor | None = None


def prepare_rows(past: Past) -> DecodeRows:
    """Prepare storage [batch, capacity, D] for the steps of a segment, in the fastest arrangement of its rows."""
    keys, values, layout, _ = past
    ends, device = layout.offsets + layout.lengths, keys.device
    chosen = "kernel" if keys.is_cuda else _choose(layout, keys.shape[2])
    note_choice(lambda: DECODE_KERNEL if chosen == "kernel" else _explain(chosen, layout))
    if chosen == "kernel":
        return DecodeRows(past, ends=ends)
    if layout.uniform or chosen == "grouped":
        groups = tuple(
            (view_group(keys, group, group.free_slots), view_group(values, group, group.free_slots))
            for group in layout.groups
        )
        return DecodeRows(past, groups=groups, ends=None if layout.uniform else ends)
    if chosen == "together":
        slot = torch.arange(layout.capacity, device=device)
        own = (slot >= layout.offsets[:, None]) & (slot < ends[:, None] + layout.free_slots)
        ages = (slot - ends[:, None]).masked_fill_(~own, layout.capacity)
        return DecodeRows(past, ends=ends, ages=ages)
    place = torch.arange(layout.longest + layout.free_slots, device=device)
    slots = (layout.offsets[:, None] + place).clamp_(max=layout.capacity - 1).flatten()
    ages = (place - layout.lengths[:, None])[:, None]
    return DecodeRows(past, ends=ends, ages=ages, slots=slots)


def _choose(layout: Layout, channels: int) -> Arrangement:
    """Return the fastest arrangement outside CUDA for these lengths (docs/laboratory.md, "Next-token decoding")."""
    lengths, rows = len(layout.groups), len(layout.counts)
    copied = 2 * rows * (layout.longest + layout.free_slots) * channels
    if MIN_ROWS_PER_LENGTH * lengths <= rows or CALL_ELEMENTS * lengths <= copied:
        return "grouped"
    return "together" if layout.total <= MAX_TOTAL_LENGTHS * layout.longest else "padded"


def _explain(chosen: Arrangement, layout: Layout) -> AttentionChoice:
    """Return the arrangement of a segment's steps by torch's attention, and the reasons against others."""
    if layout.uniform:
        return AttentionChoice("decode in place", (("kernel", "needs a GPU"),))
    rest = [other for other in get_args(Arrangement) if other not in (chosen, "kernel")]
    others = (("kernel", "needs a GPU"), *((other, "costs more for rows of these lengths") for other in rest))
    return AttentionChoice(f"decode {chosen}", others)


def decode_attention(q: Tensor, k: Tensor, v: Tensor, rows: DecodeRows, filled: int, scale: float) -> Tensor:
    """Write new tokens into the free slots after every row; each attends to all tokens before it and to itself.

    A kernel reads rows of any length in place; torch's attention reads rows as arranged.

    Args:
        q: [batch, rows, queries, D]; with grouped queries the heads of one KV head follow each other in `queries`:
            query m belongs to new token m % tokens.
        k: keys of the new tokens [batch, rows, tokens, D].
        v: values of the new tokens, shaped like k.
        rows: the layer's storage, written to.
        filled: earlier tokens of the segment.
        scale: factor on q k^T, positive.

    Returns:
        [batch, rows, queries, D] in q's dtype.
    """
    if not rows.groups and rows.ages is None:
        from kvbench.kernels.triton.ragged_attention import ragged_attention_triton

        layout = rows.past.layout
        before = rows.past._replace(layout=layout._replace(lengths=layout.lengths + filled))
        out, _ = ragged_attention_triton(q, k, v, before, scale, causal=True)
        write_tokens(k, v, rows, filled)
        return out
    write_tokens(k, v, rows, filled)
    tokens = k.shape[2]
    if rows.groups:
        return _attend_groups(q, rows, filled, tokens, scale)
    assert rows.ages is not None
    last: int | Tensor = filled  # age of the last slot that each query sees
    if tokens > 1:
        last = filled + torch.arange(q.shape[2], device=q.device) % tokens
    if rows.slots is None:
        # Swap rows and queries: all rows read the same keys.
        seen = rows.ages <= (last if isinstance(last, int) else last[:, None, None])
        q = q.transpose(1, 2)
        keys, values = (x[:, None].expand(-1, q.shape[1], -1, -1) for x in rows.past[:2])
        return _attend(q, keys, values, seen, scale).transpose(1, 2)
    seen = rows.ages <= (last if isinstance(last, int) else last[:, None])
    shape = (len(rows.past.layout.counts), -1)
    keys, values = (x.index_select(1, rows.slots).unflatten(1, shape) for x in rows.past[:2])
    return _attend(q, keys, values, seen, scale)


def decode_token(q: Tensor, k: Tensor, v: Tensor, rows: RowOffsets, scale: float) -> Tensor:
    """Write one token after every row, and attend to all tokens of the row, in a Triton kernel.

    Args:
        q: [batch, rows, queries, D].
        k: the token's key [batch, rows, 1, D].
        v: the token's value, shaped like k.
        rows: the layer's storage, written to.
        scale: factor on q k^T, positive.

    Returns:
        [batch, rows, queries, D] in q's dtype.
    """
    from kvbench.kernels.triton.decode_attention import decode_attention_triton

    return decode_attention_triton(q, k, v, rows, scale)


def _attend_groups(q: Tensor, rows: DecodeRows, filled: int, tokens: int, scale: float) -> Tensor:
    """Attend to the rows of each length in turn, including `tokens` new tokens; see `decode_attention`."""
    layout = rows.past.layout
    queries = [q]
    if len(rows.groups) > 1:
        queries = list(q.index_select(1, layout.order).split([group.size for group in layout.groups], 1))
    outputs = []
    for x, (keys, values), group in zip(queries, rows.groups, layout.groups, strict=True):
        end, seen = group.length + filled + tokens, None
        if tokens > 1:
            last = group.length + filled + torch.arange(q.shape[2], device=q.device) % tokens
            seen = torch.arange(end, device=q.device) <= last[:, None]
        outputs.append(_attend(x, keys.narrow(2, 0, end), values.narrow(2, 0, end), seen, scale))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1).index_select(1, layout.places)


def _attend(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None, scale: float) -> Tensor:
    if keys.dtype != q.dtype:
        keys, values = keys.to(q.dtype), values.to(q.dtype)
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=seen, scale=scale)


def write_tokens(k: Tensor, v: Tensor, rows: DecodeRows, filled: int) -> None:
    """Write new tokens after the `filled` tokens of every row."""
    tokens = k.shape[2]
    if rows.ends is None:
        ((keys, values),) = rows.groups
        start = rows.past.layout.longest + filled
        keys.narrow(2, start, tokens).copy_(k)
        values.narrow(2, start, tokens).copy_(v)
        return
    slots = (
        rows.ends + filled
        if tokens == 1
        else list_free_slots(rows.past.layout, filled, filled + tokens).flatten()
    )
    for storage, new in ((rows.past.keys, k), (rows.past.values, v)):
        new = new.flatten(1, 2)
        storage.index_copy_(1, slots, new if new.dtype == storage.dtype else new.to(storage.dtype))
