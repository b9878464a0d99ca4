"""Share of each source's tokens that each head still holds, computed from layouts."""

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
        layouts: layout of each layer's rows, [L].
        padding: padding tokens in front of the prompts; None without padding.
    """

    segment: Segment
    layouts: Sequence[Layout]
    padding: Padding | None


def measure_shares(held: CacheSnapshot, heads: int, edges: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Measure the held share of each source; on a GPU the host waits once, at the end.

    Args:
        held: contents of a cache.
        heads: KV heads of a layer, H. A layout has H rows, or H rows for each sequence.
        edges: positions at which sources begin, ascending, then the end of the last one.

    Returns:
        Share of each source's tokens that a head holds, float64 [L, H, sources], and tokens of each source, float64
        [sources]; both are means over sequences, on the CPU.
    """
    device = held.layouts[0].positions.device
    bounds = torch.tensor(edges).to(device, non_blocking=True)
    rows = [layout.positions.masked_fill(layout.positions < 0, edges[-1]) for layout in held.layouts]
    counts = torch.stack(
        [torch.searchsorted(row, bounds.expand(len(row), -1).contiguous()).diff(dim=1) for row in rows]
    )
    missing = bounds.new_zeros(1) if held.padding is None else held.padding.sequences
    first = torch.maximum(bounds[:-1], missing[:, None])  # first token of a source that is not padding
    tokens = (bounds[1:] - first).clamp(min=0).double()
    kept = counts.unflatten(1, (-1, heads)) / tokens[:, None].clamp(min=1)
    return kept.mean(1).cpu(), tokens.mean(0).cpu()
