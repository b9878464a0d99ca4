"""Calibrations of heads, and their classes: contextual or structural."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.core.segments import ModelSpec
from kvbench.methods.shared.calibration import Observer
from kvbench.methods.shared.select import sum_by_segment
from kvbench.methods.shared.view import View


@dataclass
class ColumnVariance(Observer):
    """Calibration of sigma [L, H]: variance of a slot's attention over the last scale's queries, summed over slots.

    It is low for contextual heads, in which all queries attend to the same keys. Only conditional rows count.
    """

    kind: ClassVar[str] = "column_variance"

    def tensor_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """Return the shape [L, H] of `sigma`."""
        return {"sigma": (spec.layers, spec.heads)}

    def accumulate(self, view: View) -> None:
        """Add the variance over the last scale's queries."""
        if view.segment.last:
            self.sums["sigma"][view.layer] += self.select_conditional(measure_column_variance(view)).sum(0)


@dataclass
class HeadPatterns(ColumnVariance):
    """Calibration of sigma [L, H] (`ColumnVariance`) and of each head's attention by scale, from the same generations.

    The tensor `mass` is float64 [L, H, K, K]: [l, h, k, s] is the attention of the queries of scale k to scale s, mean
    over queries and prompts, conditional rows only.
    """

    kind: ClassVar[str] = "head_patterns"

    def tensor_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """Return the shapes of `sigma`, [L, H], and `mass`, [L, H, K, K]."""
        scales = len(spec.segments)
        return super().tensor_shapes(spec) | {"mass": (spec.layers, spec.heads, scales, scales)}

    def accumulate(self, view: View) -> None:
        """Add the attention of the segment's queries to each source, and the last scale's variance."""
        super().accumulate(view)
        k = view.segment.index
        mass = self.select_conditional(sum_by_segment(view)).sum(0)
        self.sums["mass"][view.layer, :, k, : k + 1] += mass


def measure_column_variance(view: View) -> Tensor:
    """Return the variance over queries of a slot's attention, summed over slots: float32 [rows]."""
    return (view.mass(power=2) - view.mass().square()).sum(-1)


def find_contextual(sigma: Tensor, alpha: float) -> Tensor:
    """Return the contextual heads, bool [L, H]: the share `alpha` of lowest variance, the earlier head on ties.

    All heads of all layers are ranked together by their column variance `sigma` [L, H] (HACK Eq. 6, HACK++ Eq. 7).
    """
    order = sigma.flatten().sort(stable=True).indices
    classes = torch.zeros(sigma.numel(), dtype=torch.bool)
    classes[order[: round(alpha * sigma.numel())]] = True
    return classes.view(sigma.shape)
