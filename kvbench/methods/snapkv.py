"""SnapKV: scores by attention from a window of the newest queries."""

from dataclasses import dataclass

from kvbench.methods.shared.scored import WindowAttention


@dataclass
class SnapKV(WindowAttention):
    """Keep a window of the current segment and the earlier tokens it attends to most, an even share of B in every head.

    A slot's score is the attention from the window's queries, smoothed by one-dimensional pooling along the cache,
    separately for each head and sequence (arXiv:2404.14469).

    Differs from the paper in: there is no prompt to observe, so the window moves with the segments. By default it is
    ScaleKV's grid over the current map, so that only the allocation differs from that method. Papers that compare with
    SnapKV on image models do not describe their port; all settings are open choices. The paper protects no sinks.
    """
