"""SnapKV: the tokens that a few of the newest queries attend to."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from kvbench.methods.base import View
from kvbench.methods.scored import Windowed
from kvbench.methods.select import Pool, average_attention, find_asking, smooth_outside


@dataclass
class SnapKV(Windowed):
    """Keep a window of the current segment and the earlier tokens it attends to most, an even share of B in every head.

    A slot's score is its attention from the window's queries, smoothed by one-dimensional pooling along the cache, for
    every head and sequence by itself (arXiv:2404.14469).

    Differs from the paper in: there is no prompt to observe, so the window moves along with the segments; by default it
    is ScaleKV's grid over the current map, which leaves allocation as the only difference to that method. The papers
    that compare with SnapKV on image models do not give their port; all of the settings are open choices. The paper
    protects no sinks.

    Attributes:
        softmax: over all slots (original, kvpress) or those outside the window (R-KV).
        group: query heads that share a KV head: mean of probabilities (kvpress) or maximum of logits (R-KV).
        pool: kind of smoothing.
    """

    softmax: Literal["all", "prefix"] = "all"
    group: Literal["mean", "max"] = "mean"
    pool: Pool = "max"

    revision: ClassVar[int] = 2  # slots that a row has not were its slots' neighbours

    def score_outside(self, view: View, chosen: Tensor, inside: Tensor) -> Tensor:
        """Return the smoothed attention from the window's queries, float32 [rows, slots]."""
        attention = average_attention(
            view.scores(chosen),
            inside,
            softmax=self.softmax,
            group=self.group,
            asking=find_asking(view, chosen),
        )
        return smooth_outside(attention, inside, self.pool, self.kernel, exists=self.uneven(view))
