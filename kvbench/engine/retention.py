"""Share of each source's tokens that each head still holds, counted from the layouts."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.core.segments import Segment
from kvbench.engine.padding import Padding
from kvbench.kernels.layout import Layout


class CacheSnapshot(NamedTuple):
    """Contents of a cache at the beginning of a segment.

    Attributes:
        segment: the segment.
        layouts: of each layer's rows, L of them.
        padding: padding tokens in front of the prompts; None without padding.
    """

    segment: Segment
    layouts: Sequence[Layout]
    padding: Padding | None


class Shares(NamedTuple):
    """Share of each source that is still held.

    Attributes:
        kept: float64 [L, H, sources], share of a source's tokens that a head holds, a mean over sequences.
        tokens: float64 [sources], tokens of a source, a mean over the sequences.
    """

    kept: Tensor
    tokens: Tensor


def measure_shares(held: CacheSnapshot, heads: int, edges: Sequence[int]) -> Shares:
    """Measure the share of each source that is held; on a GPU the host waits once, at the end.

    Args:
        held: contents of a cache.
        heads: KV heads of a layer, H. A layout has H rows, or H rows for each sequence.
        edges: positions at which sources begin, ascending, then the end of the last source.

    Returns:
        Shares on the CPU.
    """
    device = held.layouts[0].positions.device
    bounds = torch.tensor(edges).to(device, non_blocking=True)
    counts = torch.stack([_count_tokens(layout.positions, bounds, edges[-1]) for layout in held.layouts])
    missing = bounds.new_zeros(1) if held.padding is None else held.padding.sequences
    first = torch.maximum(bounds[:-1], missing[:, None])  # first token of a source that is no padding
    tokens = (bounds[1:] - first).clamp(min=0).double()
    kept = counts.unflatten(1, (-1, heads)) / tokens[:, None].clamp(min=1)
    return Shares(kept.mean(1).cpu(), tokens.mean(0).cpu())


def _count_tokens(positions: Tensor, bounds: Tensor, end: int) -> Tensor:
    """Count the positions of each row between neighbouring bounds, int64 [rows, sources].

    Args:
        positions: int64 [rows, longest], ascending, -1 past a row's end.
        bounds: int64 [sources + 1], ascending.
        end: the last of them.
    """
    ascending = positions.masked_fill(positions < 0, end)
    return torch.searchsorted(ascending, bounds.expand(len(positions), -1).contiguous()).diff(dim=1)
