"""Attention of each head to each source scale, and HeatKV's orders of heads."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvbench.core.segments import ModelSpec
from kvbench.methods.shared.calibration import Observer
from kvbench.methods.shared.select import sum_by_segment
from kvbench.methods.shared.view import View


@dataclass
class AttentionByScale(Observer):
    """Calibration of S-CAS and CAS: attention of each scale's queries to each source scale, conditional rows only.

    The tensor `mass` is float64 [L, H, K, K]: [l, h, k, i] is the attention of the queries of scale k to scale i, mean
    over queries and prompts (HeatKV Eq. 2).
    """

    kind: ClassVar[str] = "attention_by_scale"

    def tensor_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """Return the shape [L, H, K, K] of `mass`."""
        scales = len(spec.segments)
        return {"mass": (spec.layers, spec.heads, scales, scales)}

    def accumulate(self, view: View) -> None:
        """Add the attention of the segment's queries to each source."""
        index = view.segment.index
        mass = self.select_conditional(sum_by_segment(view)).sum(0)
        self.sums["mass"][view.layer, :, index, : index + 1] += mass


def scas(mass: Tensor) -> Tensor:
    """Average the attention to source i over all later scales, the last included: S-CAS [L, H, K] (HeatKV Eq. 2, 4).

    `mass` is float64 [L, H, K, K], target scale before source scale. The last scale, which has no later scale, is NaN.
    Scores do not depend on the number of sinks.
    """
    scales = mass.shape[-1]
    scores = mass.new_full((*mass.shape[:2], scales), torch.nan)
    for source in range(scales - 1):
        scores[..., source] = mass[:, :, source + 1 :, source].sum(-1) / (scales - 1 - source)
    return scores


def cas(mass: Tensor, sinks: int = 0) -> Tensor:
    """Average the last scale's attention to the earlier scales after the sinks: CAS [L, H] (HeatKV Eq. 3).

    `mass` is float64 [L, H, K, K], target scale before source scale.
    """
    scales = mass.shape[-1]
    return mass[:, :, -1, sinks : scales - 1].sum(-1) / (scales - sinks)


def rank_heads(scores: Tensor) -> NDArray[np.int64]:
    """Return every head's rank in ascending order of score [L, H, S], ties by head, then layer: int64 [S, L, H]."""
    layers, heads, sources = scores.shape
    values = scores.numpy()
    layer, head = np.divmod(np.arange(layers * heads), heads)
    ranks = np.empty((sources, layers, heads), np.int64)
    for source in range(sources):
        order = np.lexsort((layer, head, values[..., source].reshape(-1)))
        ranks[source].reshape(-1)[order] = np.arange(layers * heads)
    return ranks
