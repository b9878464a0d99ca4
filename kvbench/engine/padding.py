"""Left padding of prompts of unequal length, which is neither attended to nor stored."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.core.segments import ModelSpec, Segment
from kvbench.engine.schedule import Change
from kvbench.kernels.compact import source_table
from kvbench.kernels.layout import Layout, list_positions


class Padding(NamedTuple):
    """Tokens in front of the prompts of a batch that do not exist.

    Attributes:
        sequences: int64 [sequences], how many each sequence has.
        rows: int64 [sequences x heads], the same number for each of a sequence's KV heads.
        min_tokens: how many every sequence has at least.
    """

    sequences: Tensor
    rows: Tensor
    min_tokens: int


def read_padding(
    spec: ModelSpec, sequences: int, padding: Sequence[int] | None, device: torch.device
) -> Padding | None:
    """Check the padding of a batch; None where no prompt has any.

    Args:
        spec: the model's shapes; its first segment is the prompt.
        sequences: in the batch.
        padding: tokens in front of each sequence's prompt, or None.
        device: where the numbers go.

    Raises:
        ValueError: not one number a sequence, a prompt without tokens, or one whose tokens see each other.
    """
    if padding is None or not any(padding):
        return None
    prompt = spec.segments[0]
    if len(padding) != sequences or not all(0 <= tokens < prompt.length for tokens in padding):
        raise ValueError(
            f"padding {list(padding)}: {sequences} sequences have from 0 to {prompt.length - 1} such tokens each"
        )
    if not prompt.causal:
        raise ValueError(f"{spec.name}: only the prompt of a next-token model can be padded")
    numbers = torch.tensor(padding).to(device, non_blocking=True)
    return Padding(numbers, numbers.repeat_interleave(spec.heads), min(padding))


def attend_padded(q: Tensor, k: Tensor, v: Tensor, padding: Padding, scale: float) -> Tensor:
    """Attend over padded prompts: each token to itself and to those before it that exist.

    Args:
        q: [1, rows, queries, D]; query m belongs to token m % tokens.
        k: keys of all tokens of the prompts [1, rows, tokens, D].
        v: values, shaped like k.
        padding: of the sequences whose rows these are.
        scale: factor on q k^T.

    Returns:
        [1, rows, queries, D]; what padding receives is finite and means nothing.
    """
    token = torch.arange(k.shape[2], device=k.device)
    exists = token >= padding.sequences[:, None, None, None]
    # A token of the padding sees itself, for a softmax over nothing is no number.
    seen = (exists & (token <= token[:, None])) | (token == token[:, None])
    split = (len(padding.sequences), -1)
    q, k, v = (x.squeeze(0).unflatten(0, split) for x in (q, k, v))
    seen = seen.repeat(1, 1, q.shape[2] // k.shape[2], 1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
    return out.flatten(0, 1)[None]


def follow_schedule(change: Change, at: Segment, layout: Layout, padding: Padding, free_slots: int) -> Change:
    """Return the change of padded rows that keep what a static method keeps of unpadded ones, less the padding.

    Args:
        change: what the schedule says of the KV heads of one sequence.
        at: the segment that just ran.
        layout: of the padded rows before the segment is stored.
        padding: of their sequences.
        free_slots: free slots behind every row of the new layout.
    """
    positions, sequences = change.layout.positions, len(padding.sequences)
    kept = positions.new_zeros(len(positions), at.end + 1, dtype=torch.bool)  # a row's end goes to the last
    kept.scatter_(1, torch.where(positions < 0, at.end, positions), value=True)
    seen = list_positions(layout, at.start, at.length)
    keep = kept.repeat(sequences, 1).gather(1, seen.clamp(min=0)) & (seen >= padding.rows[:, None])
    return Change(*source_table(layout, keep, at.start, at.length, free_slots), appends=False)
