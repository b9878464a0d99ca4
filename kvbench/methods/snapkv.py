"""SnapKV: the tokens that a few of the newest queries attend to."""

from dataclasses import dataclass

from kvbench.methods.shared.scored import WindowAttention


@dataclass
class SnapKV(WindowAttention):
    """Keep a window of the current segment and the earlier tokens it attends to most, an even share of B in every head.

    A slot's score is its attention from the window's queries, smoothed by one-dimensional pooling along the cache, for
    every head and sequence by itself (arXiv:2404.14469).

    Differs from the paper in: there is no prompt to observe, so the window moves along with the segments; by default it
    is ScaleKV's grid over the current map, which leaves allocation as the only difference to that method. The papers
    that compare with SnapKV on image models do not give their port; all of the settings are open choices. The paper
    protects no sinks.
    """
