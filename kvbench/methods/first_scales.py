"""Data-free baseline that keeps the earliest scales."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.calibration import Artifact
from kvbench.methods.shared.capacities import share_evenly
from kvbench.methods.shared.select import check_capacity, spread_capacity
from kvbench.methods.shared.view import View


@dataclass
class FirstScales(Method):
    """Keep the earliest tokens in each head: the leading scales that fit, and the beginning of the next scale.

    Heads share B evenly and hold the same tokens. The choice is final and reads no data. This is the opposite of `swa`,
    and the limit of more and more sinks.
    """

    static: ClassVar[bool] = True
    revision: ClassVar[int] = 1  # before, padding in front of a prompt reduced what is kept

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuse a budget below one token per head."""
        super().check(spec, budget)
        check_capacity(spec, budget)

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Share the budget evenly among all heads."""
        super().prepare(spec, budget, artifact)
        self._capacities = share_evenly(budget.tokens, spec)

    def keep(self, view: View) -> Tensor:
        """Keep the earliest tokens that fit, bool [rows, slots]."""
        capacity = spread_capacity(self._capacities[view.layer], view)
        return view.position < (capacity if isinstance(capacity, int) else capacity[:, None])
