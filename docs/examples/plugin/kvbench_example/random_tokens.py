"""Random eviction: the baseline to hold every method against."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.calibration import Artifact
from kvbench.methods.shared.select import check_capacity
from kvbench.methods.shared.view import View


@dataclass
class RandomTokens(Method):
    """Keep the tokens of the sink scales and a random choice of all others, as many in every head.

    Every token of a layer and head draws a rank once; a head keeps the highest ranks, so that what it holds is at any
    time a uniform sample of what it has seen.

    Attributes:
        sinks: leading scales that are always kept.
        seed: seed of the ranks.
    """

    sinks: int
    seed: int = 0

    static: ClassVar[bool] = True

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuse a budget that the sinks alone exceed."""
        check_capacity(spec, budget, self.sinks)

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Draw the ranks, float32 [layers, heads, positions]; those of the sinks are above every draw."""
        super().prepare(spec, budget, artifact)
        generator = torch.Generator().manual_seed(self.seed)
        self._ranks = torch.rand(spec.layers, spec.heads, spec.cached_length, generator=generator)
        self._ranks[..., : spec.leading_tokens(self.sinks)] = 1

    def keep(self, view: View) -> Tensor:
        """Return the slots of the highest ranks, bool [heads, slots]."""
        ranks = self._ranks[view.layer].to(view.position.device).gather(1, view.position.clamp(min=0))
        best = ranks.topk(min(self.budget.head_tokens, ranks.shape[1])).indices
        return torch.zeros_like(ranks, dtype=torch.bool).scatter(1, best, True)
