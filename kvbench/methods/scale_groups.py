"""AMS-KV's ablation: what each group of scales is worth."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import Family, ModelSpec
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.view import View


@dataclass
class ScaleGroups(Method):
    """Cache everything but one group of source scales (AMS-KV, Table 1; it has no budget).

    Condensed scales are the first two, local ones the last two that are ever read, intermediate ones those between.

    Differs from the paper in: it does not say whether "local" moves along with the current scale. Here groups are fixed
    by their place before the last scale, where the paper looks at attention (Figure 4), and what is removed is never
    cached.

    Attributes:
        remove: which group; `all` leaves nothing of the past.
        condensed: scales at the start.
        local: scales before the last one.
    """

    remove: Literal["none", "intermediate", "local", "condensed", "all"] = "none"
    condensed: int = 2
    local: int = 2
    strict: bool = False

    families: ClassVar[tuple[Family, ...]] = ("next-scale",)
    static: ClassVar[bool] = True

    @property
    def budgeted(self) -> bool:
        """Return whether it stops when the budget is exceeded; what it keeps does not depend on it."""
        return self.strict

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuse groups that overlap."""
        super().check(spec, budget)
        if self.condensed < 0 or self.local < 0 or self.condensed + self.local >= len(spec.segments):
            raise ValueError(
                f"method.condensed={self.condensed}, method.local={self.local}: {spec.name} caches "
                f"{len(spec.segments) - 1} scales"
            )

    def keep(self, view: View) -> Tensor:
        """Keep all slots of the other groups."""
        first, end = {
            "none": (0, 0),
            "all": (0, len(self.spec.segments)),
            "condensed": (0, self.condensed),
            "intermediate": (self.condensed, len(self.spec.segments) - 1 - self.local),
            "local": (len(self.spec.segments) - 1 - self.local, len(self.spec.segments) - 1),
        }[self.remove]
        return (view.segment_ids < first) | (view.segment_ids >= end)
