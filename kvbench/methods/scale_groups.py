"""Ablation of AMS-KV: the removal of groups of scales."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import Family, ModelSpec
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.view import View


@dataclass
class ScaleGroups(Method):
    """Cache all scales except one group (AMS-KV, Table 1; without a budget).

    Condensed scales are the first two, local scales the last two that are read, intermediate scales all between.

    Differs from the paper in: the paper does not say whether "local" moves with the current scale. Here groups are
    fixed relative to the last scale, where the paper measures attention (Figure 4), and a removed group is never
    cached.

    Attributes:
        remove: group that is not cached; `all` caches nothing.
        condensed: number of scales at the start.
        local: number of scales before the last scale.
    """

    remove: Literal["none", "intermediate", "local", "condensed", "all"] = "none"
    condensed: int = 2
    local: int = 2
    strict: bool = False

    families: ClassVar[tuple[Family, ...]] = ("next-scale",)
    static: ClassVar[bool] = True
    follows_budget: ClassVar[bool] = False

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuse negative numbers of scales, groups that overlap, and what the base class refuses."""
        super().check(spec, budget)
        if self.condensed < 0 or self.local < 0 or self.condensed + self.local >= len(spec.segments):
            raise ValueError(
                f"method.condensed={self.condensed}, method.local={self.local}: {spec.name} caches "
                f"{len(spec.segments) - 1} scales; lower them"
            )

    def keep(self, view: View) -> Tensor:
        """Keep all slots outside the removed group, bool [rows, slots]."""
        cached = len(self.spec.segments) - 1
        first, end = {
            "none": (0, 0),
            "all": (0, cached + 1),
            "condensed": (0, self.condensed),
            "intermediate": (self.condensed, cached - self.local),
            "local": (cached - self.local, cached),
        }[self.remove]
        return (view.segment_ids < first) | (view.segment_ids >= end)
