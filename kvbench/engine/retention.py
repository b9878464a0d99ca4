"""Share of each source's tokens that every head still holds, counted from the layouts."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.core.segments import Segment
from kvbench.engine.padding import Padding
from kvbench.kernels.layout import Layout


class Held(NamedTuple):
    """Contents of a cache at the beginning of a segment.

    Attributes:
        segment: the one that began.
        layouts: where the rows of each layer lay then, L of them.
        padding: tokens in front of the prompts that do not exist; None if there are none.
    """

    segment: Segment
    layouts: Sequence[Layout]
    padding: Padding | None


class Shares(NamedTuple):
    """Share of each source that is still held.

    Attributes:
        kept: float64 [L, H, sources], share of a source's tokens that a head holds, a mean over the sequences.
        tokens: float64 [sources], tokens of a source, a mean over the sequences.
    """

    kept: Tensor
    tokens: Tensor


def measure_shares(held: Held, heads: int, edges: Sequence[int]) -> Shares:
    """Count what is held of every source; on a GPU the host waits once, at the end.

    Args:
        held: what a cache held.
        heads: KV heads of a layer, H. A layout has as many rows, or as many for each sequence.
        edges: positions at which sources begin, ascending, and the one after the last of them.

    Returns:
        Shares on the CPU.
    """
    device = held.layouts[0].positions.device
    bounds = torch.tensor(edges).to(device, non_blocking=True)
    counts = torch.stack([_count_tokens(layout.positions, bounds, edges[-1]) for layout in held.layouts])
    missing = bounds.new_zeros(1) if held.padding is None else held.padding.sequences
    first = torch.maximum(bounds[:-1], missing[:, None])  # of a source's tokens, one that exists
    tokens = (bounds[1:] - first).clamp(min=0).double()
    kept = counts.unflatten(1, (-1, heads)) / tokens[:, None].clamp(min=1)
    return Shares(kept.mean(1).cpu(), tokens.mean(0).cpu())


def _count_tokens(positions: Tensor, bounds: Tensor, end: int) -> Tensor:
    """Return how many positions of each row lie between neighbouring bounds, int64 [rows, sources].

    Args:
        positions: int64 [rows, longest], ascending, -1 past a row's end.
        bounds: int64 [sources + 1], ascending.
        end: the last of them.
    """
    ascending = positions.masked_fill(positions < 0, end)
    return torch.searchsorted(ascending, bounds.expand(len(positions), -1).contiguous()).diff(dim=1)
