"""Left padding of prompts of unequal length, which is neither attended to nor stored."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.core.segments import ModelSpec, Segment
from kvbench.engine.schedule import StorageChange, call_keep, show_layer
from kvbench.kernels.compact import source_table
from kvbench.kernels.layout import Layout, list_positions
from kvbench.methods.shared.base import Method


class Padding(NamedTuple):
    """Padding tokens in front of the prompts of a batch.

    Attributes:
        sequences: int64 [sequences], padding tokens of each sequence.
        rows: int64 [sequences x heads], padding tokens of each row.
        prompts: tokens of each sequence's prompt.
    """

    sequences: Tensor
    rows: Tensor
    prompts: tuple[int, ...]


def read_padding(
    spec: ModelSpec, sequences: int, padding: Sequence[int] | None, device: torch.device
) -> Padding | None:
    """Check the padding of a batch and return it; None without padding.

    Args:
        spec: the model's shapes; its first segment is the prompt.
        sequences: number of sequences in the batch.
        padding: padding tokens in front of each sequence's prompt, or None.
        device: device of the result.

    Raises:
        ValueError: `padding` lacks a value per sequence, leaves a prompt no token, or the prompt is not causal.
    """
    if padding is None or not any(padding):
        return None
    prompt = spec.segments[0]
    if len(padding) != sequences or not all(0 <= tokens < prompt.length for tokens in padding):
        raise ValueError(f"padding {list(padding)}: must be {sequences} values from 0 to {prompt.length - 1}")
    if not prompt.causal:
        raise ValueError(f"{spec.name}: only prompts of next-token models can be padded")
    counts = torch.tensor(padding).to(device, non_blocking=True)
    prompts = tuple(prompt.length - tokens for tokens in padding)
    return Padding(counts, counts.repeat_interleave(spec.heads), prompts)


def cut_padding(cut: int, sequences: int, padding: Sequence[int] | None) -> Sequence[int] | None:
    """Return the padding of a batch without the `cut` padding tokens that all prompts have.

    Raises:
        ValueError: a prompt has less padding, as it is longer than the method was prepared for.
    """
    if not cut:
        return padding
    given = padding or [0] * sequences
    if min(given, default=cut) < cut:
        raise ValueError(f"padding {list(given)}: the method was prepared for at least {cut} padding tokens")
    return [tokens - cut for tokens in given]


def cut_queries(given: Callable[[], Tensor] | None, cut: int) -> Callable[[], Tensor] | None:
    """Return a function of raw queries [sequences, heads, tokens, D] without the first `cut` tokens."""
    return None if given is None else lambda: given()[:, :, cut:].contiguous()


def attend_padded(q: Tensor, k: Tensor, v: Tensor, padding: Padding, scale: float) -> Tensor:
    """Attend over padded prompts: each token to itself and to earlier tokens that are not padding.

    Args:
        q: [sequences, heads, queries, D]; query m belongs to token m % tokens.
        k: keys of all tokens of the prompts [sequences, heads, tokens, D].
        v: values, shaped like k.
        padding: padding of the sequences.
        scale: factor on q k^T.

    Returns:
        The output, shaped like q; it is finite but meaningless for padding.
    """
    token = torch.arange(k.shape[2], device=k.device)
    exists = token >= padding.sequences[:, None, None, None]
    # A padding token sees itself, because a softmax over nothing is NaN.
    seen = (exists & (token <= token[:, None])) | (token == token[:, None])
    seen = seen.repeat(1, 1, q.shape[2] // k.shape[2], 1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)


def follow_schedule(
    change: StorageChange, segment: Segment, layout: Layout, padding: Padding, free_slots: int
) -> StorageChange:
    """Return the storage change of padded rows, which keep the slots of a static method's schedule except padding.

    Args:
        change: the schedule's change for the KV heads of one sequence.
        segment: the segment that just ran.
        layout: layout of the padded rows before the segment is stored.
        padding: padding of their sequences.
        free_slots: free slots behind each row of the new layout.
    """
    positions, sequences = change.layout.positions, len(padding.sequences)
    kept = positions.new_zeros(len(positions), segment.end + 1, dtype=torch.bool)  # last: empty slots
    kept.scatter_(1, torch.where(positions < 0, segment.end, positions), value=True)
    seen = list_positions(layout, segment.start, segment.length)
    keep = kept.repeat(sequences, 1).gather(1, seen.clamp(min=0)) & (seen >= padding.rows[:, None])
    return StorageChange(*source_table(layout, keep, seen, segment.length, free_slots), appends=False)


def plan_padded_change(
    method: Method,
    spec: ModelSpec,
    layer: int,
    segment: Segment,
    layout: Layout,
    padding: Padding,
    free_slots: int,
) -> StorageChange:
    """Return the storage change of padded rows under a static method, which plans for the length of each prompt.

    The method sees positions from the prompt's first token. One call serves all prompts of a length.

    Args:
        method: a static method, prepared for the longest prompt.
        spec: the model's shapes.
        layer: index of the layer.
        segment: the segment that just ran.
        layout: layout of the padded rows before the segment is stored.
        padding: padding of their sequences.
        free_slots: free slots behind each row of the new layout.
    """
    count = len(padding.prompts)
    rows = show_layer(layer, segment, layout, spec, count, padding=padding.rows)
    tables = rows.position.chunk(count), rows.segment_ids.chunk(count)
    kept: dict[int, Tensor] = {}
    for tokens, position, segment_ids in zip(padding.prompts, *tables, strict=True):
        if tokens not in kept:
            shift, present = spec.ends[0] - tokens, position >= 0
            shifted = (
                segment._replace(start=segment.start - shift)
                if segment.index
                else segment._replace(width=tokens)
            )
            view = replace(
                rows,
                segment=shifted,
                sequences=1,
                position=(position - shift).masked_fill(~present, -1),
                _segment_ids=segment_ids,
                padding=None,
            )
            keep = call_keep(method.plan_for(tokens), view)
            kept[tokens] = present if keep is None else present & keep
    keep = torch.cat([kept[tokens] for tokens in padding.prompts])
    return StorageChange(
        *source_table(layout, keep, rows.position, segment.length, free_slots), appends=False
    )
