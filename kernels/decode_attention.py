"""Attention of a few new tokens over each row's cached keys, the tokens before them in their segment, and themselves.

Tokens of a segment that is not full yet lie in the free slots behind every row (`kernels/layout.py`): a step writes its
own keys and values there, and reads all others in place. `prepare_rows` builds once what a segment's steps share.
"""

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.kernels.attention_choices import Choice, note_choice
from kvbench.kernels.layout import Layout, Past, list_free_slots, view_group

Arrangement = Literal["kernel", "together", "grouped", "padded"]
"""Arrangements of rows of unequal length (HeadKV, arXiv:2605.20600, section 4, compares similar ones).

`kernel`: where they lie, by a Triton kernel. The others are for torch's attention. `together`: every row reads all
slots under a mask. `grouped`: rows of one length at a time. `padded`: a copy in which all rows are as long as the
longest, under a mask.
"""
WORTH_GROUPING = 4
"""Rows are read group by group where that many have the same length on average: it takes a call for each length."""
WORTH_COPYING = 12
"""Other rows are read together until they are so many times as long as the longest of them; then a copy is worth it."""
CALL_NUMBERS = 25_000
"""Numbers that are copied in the time of a call of attention: long rows are read by length, however few share one."""


class DecodeRows(NamedTuple):
    """A layer's storage while the steps of a segment fill the free slots behind its rows.

    Attributes:
        past: stored keys and values [batch, capacity, D].
        filled: int64 [1], tokens of the segment that came before the step, for the kernel of one token; None: the
            kernel of several tokens does.
        groups: keys and values of the rows of each length, views [batch, rows, length + free_slots, D], in the layout's
            order; empty if rows are read together, padded, or by a kernel.
        ends: int64 [rows], the slot behind each row; None where all rows are one group.
        ages: how far slots lie behind a row's first free one, and never as far as 0 for what does not belong to the
            row: int64 [rows, capacity] if rows are read together, [rows, 1, width] if they are padded, else None.
        slots: int64 [rows x width], the slots of rows that are padded to the longest; None otherwise.
    """

    past: Past
    filled: Tensor | None = None
    groups: tuple[tuple[Tensor, Tensor], ...] = ()
    ends: Tensor | None = None
    ages: Tensor | None = None
    slots: Tensor | None = None


def prepare_rows(
    past: Past, arrangement: Arrangement | None = None, filled: Tensor | None = None
) -> DecodeRows:
    """Prepare storage for the steps of a segment.

    Args:
        past: stored keys and values [batch, capacity, D].
        arrangement: how rows of unequal length are read; None for what is fastest: on CUDA by a kernel, elsewhere as
            the number of lengths says (docs/performance.md, "Next-token models").
        filled: see `DecodeRows`.
    """
    keys, values, layout = past
    ends, device = layout.offsets + layout.lengths, keys.device
    chosen = arrangement or ("kernel" if keys.is_cuda else _choose(layout, keys.shape[2]))
    note_choice(lambda: _explain(chosen, layout))
    if chosen == "kernel":
        return DecodeRows(past, filled, ends=ends)
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
    lengths, rows = len(layout.groups), len(layout.counts)
    copied = 2 * rows * (layout.longest + layout.free_slots) * channels
    if WORTH_GROUPING * lengths <= rows or CALL_NUMBERS * lengths <= copied:
        return "grouped"
    return "together" if layout.total <= WORTH_COPYING * layout.longest else "padded"


def _explain(chosen: Arrangement, layout: Layout) -> Choice:
    """Return how steps read rows, and why they do not otherwise."""
    if chosen == "kernel":
        return Choice("decode kernel", (("torch's attention", "reads rows of one length, or copies"),))
    if layout.uniform:
        return Choice("decode in place", (("kernel", "needs a GPU"),))
    rest = [other for other in get_args(Arrangement) if other not in (chosen, "kernel")]
    dearer = tuple((other, "costs more for rows of these lengths") for other in rest)
    others = (("kernel", "needs a GPU"), *dearer)
    return Choice(f"decode {chosen}", others)


def decode_attention(q: Tensor, k: Tensor, v: Tensor, rows: DecodeRows, filled: int, scale: float) -> Tensor:
    """Write new tokens into the free slots behind every row; each attends to all tokens before it and to itself.

    Kernels read rows of any length where they lie, that of one token writing it as well; torch's attention reads them
    as arranged.

    Args:
        q: [batch, rows, queries, D]; with grouped queries the heads of one KV head lie behind each other in `queries`:
            query m belongs to new token m % tokens.
        k: keys of the new tokens [batch, rows, tokens, D].
        v: values of the new tokens, shaped like k.
        rows: the layer's storage, written to.
        filled: tokens of the segment that came before, as `rows.filled` says on the device.
        scale: factor on q k^T, positive.

    Returns:
        [batch, rows, queries, D] in q's dtype.
    """
    if not rows.groups and rows.ages is None:
        return _attend_in_place(q, k, v, rows, filled, scale)
    write_tokens(k, v, rows, filled)
    tokens = k.shape[2]
    if rows.groups:
        return _attend_groups(q, rows, filled, tokens, scale)
    assert rows.ages is not None
    last: int | Tensor = filled  # how far each query sees beyond the row's end
    if tokens > 1:
        last = filled + torch.arange(q.shape[2], device=q.device) % tokens
    if rows.slots is None:
        # Queries take the place of heads, rows that of queries: all read the one row of keys there is.
        seen = rows.ages <= (last if isinstance(last, int) else last[:, None, None])
        q = q.transpose(1, 2)
        keys, values = (x[:, None].expand(-1, q.shape[1], -1, -1) for x in rows.past[:2])
        return _attend(q, keys, values, seen, scale).transpose(1, 2)
    seen = rows.ages <= (last if isinstance(last, int) else last[:, None])
    shape = (len(rows.past.layout.counts), -1)
    keys, values = (x.index_select(1, rows.slots).unflatten(1, shape) for x in rows.past[:2])
    return _attend(q, keys, values, seen, scale)


def _attend_in_place(q: Tensor, k: Tensor, v: Tensor, rows: DecodeRows, filled: int, scale: float) -> Tensor:
    """Attend by a Triton kernel; arguments as of `decode_attention`."""
    if rows.filled is not None and k.shape[2] == 1:
        from kvbench.kernels.triton.decode_attention import decode_attention_triton

        return decode_attention_triton(q, k, v, rows.past, rows.filled, scale)
    from kvbench.kernels.triton.ragged_attention import ragged_attention_triton

    layout = rows.past.layout
    before = rows.past._replace(layout=layout._replace(lengths=layout.lengths + filled))
    out, _ = ragged_attention_triton(q, k, v, before, scale, causal=True)
    write_tokens(k, v, rows, filled)
    return out


def _attend_groups(q: Tensor, rows: DecodeRows, filled: int, tokens: int, scale: float) -> Tensor:
    """Attend to the rows of each length by themselves, `tokens` new ones among them; see `decode_attention`."""
    layout = rows.past.layout
    parts = [q]
    if len(rows.groups) > 1:
        parts = list(q.index_select(1, layout.order).split([group.size for group in layout.groups], 1))
    found = []
    for part, (keys, values), group in zip(parts, rows.groups, layout.groups, strict=True):
        end, seen = group.length + filled + tokens, None
        if tokens > 1:
            last = group.length + filled + torch.arange(q.shape[2], device=q.device) % tokens
            seen = torch.arange(end, device=q.device) <= last[:, None]
        found.append(_attend(part, keys.narrow(2, 0, end), values.narrow(2, 0, end), seen, scale))
    return found[0] if len(found) == 1 else torch.cat(found, 1).index_select(1, layout.places)


def _attend(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None, scale: float) -> Tensor:
    if keys.dtype != q.dtype:
        keys, values = keys.to(q.dtype), values.to(q.dtype)
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=seen, scale=scale)


def write_tokens(k: Tensor, v: Tensor, rows: DecodeRows, filled: int) -> None:
    """Write new tokens behind the `filled` ones of every row."""
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
