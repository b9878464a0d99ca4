"""Calibrations of heads, and their classes: contextual or structural."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.core.segments import ModelSpec
from kvbench.methods.heatkv.scores import AttentionByScale
from kvbench.methods.shared.calibration import Observer
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
class HeadPatterns(ColumnVariance, AttentionByScale):
    """Calibration of sigma [L, H] (`ColumnVariance`) and mass [L, H, K, K] (`AttentionByScale`) in one pass."""

    kind: ClassVar[str] = "head_patterns"

    def tensor_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """Return the shapes of `sigma`, [L, H], and `mass`, [L, H, K, K]."""
        return ColumnVariance.tensor_shapes(self, spec) | AttentionByScale.tensor_shapes(self, spec)

    def accumulate(self, view: View) -> None:
        """Add the attention of the segment's queries to each source, and the last scale's variance."""
        ColumnVariance.accumulate(self, view)
        AttentionByScale.accumulate(self, view)


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
