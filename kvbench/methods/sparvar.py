"""SparVAR: later scales read the tokens that a middle scale attended to (arXiv:2602.04361)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import Family, ModelSpec, Segment
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.calibration import Artifact
from kvbench.methods.shared.limits import Limit, set_limits
from kvbench.methods.shared.select import choose_best
from kvbench.methods.shared.uses import Uses
from kvbench.methods.shared.view import View


@dataclass
class SparVAR(Method):
    """Keep everything; later scales attend to the tokens that a middle scale attended to, mapped to their own maps.

    At the decision scale, each head records the attention that each token receives. Of the scales up to the decision
    scale, later scales read the tokens of most attention, a share `density`. Of later scales, including the current
    scale, they read the tokens that correspond to these when the decision scale's map is enlarged. The first `sinks`
    scales are read in full. The method saves reads, not memory, so it has no budget.

    Differs from the paper in: only the abstract and summaries were available, without block size, decision scale and
    densities, and the official repository contains no code. The paper selects blocks of keys for blocks of queries and
    adds local windows across scales; here all queries of a scale and head read the same tokens, without windows. Reads
    are counted (`python -m benchmarks reads`), no time is saved.

    Attributes:
        decision: index of the decision scale; None for the middle scale.
        density: share of the tokens up to the decision scale that later scales attend to.
        sinks: leading scales that are read in full.
        strict: stop when the cache exceeds the run's budget.
    """

    decision: int | None = None
    density: float = 1.0
    sinks: int = 1
    strict: bool = False

    uses = Uses(sparse_reads=True)
    follows_budget: ClassVar[bool] = False
    families: ClassVar[tuple[Family, ...]] = ("next-scale",)
    limits = set_limits(
        density=Limit(1e-6, 1, "must lie above 0 and not above 1"), decision=Limit(0), sinks=Limit(0)
    )

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuse a decision scale that the model lacks."""
        super().check(spec, budget)
        if self.decision is not None and self.decision >= len(spec.segments):
            raise ValueError(
                f"method.decision={self.decision}: {spec.name} has {len(spec.segments)} scales; use a smaller index"
            )

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Find the decision scale: the setting, or the middle scale."""
        super().prepare(spec, budget, artifact)
        self._decision = spec.segments[len(spec.segments) // 2 if self.decision is None else self.decision]
        self._attended: dict[int, Tensor] = {}

    def capacity(self, layer: int, segment: Segment) -> int:
        """Return the number of tokens so far, as nothing is dropped."""
        return segment.end

    def keep(self, view: View) -> None:
        """Keep everything: return None."""
        return

    def select_attended(self, view: View) -> Tensor | None:
        """Select the tokens that the decision scale attended to, bool [rows, slots]; None up to that scale."""
        if view.segment.index < self._decision.index or self.density == 1:
            return None
        if view.segment.index == self._decision.index:
            best = choose_best(view.mass(), max(1, int(self.density * self._decision.end)))
            best[:, : self.spec.leading_tokens(self.sinks)] = True
            self._attended[view.layer] = best
            return None
        attended = self._attended[view.layer]
        decisive = attended[:, self._decision.start :].unflatten(
            1, (self._decision.height, self._decision.width)
        )
        later = self.spec.segments[self._decision.index + 1 : view.segment.index + 1]
        chosen = torch.cat((attended, *(enlarge(decisive, scale) for scale in later)), 1)
        chosen[:, -1] |= ~chosen.any(1)
        return chosen


def enlarge(chosen: Tensor, scale: Segment) -> Tensor:
    """Enlarge a mask, bool [rows, height, width], to the map of `scale` by nearest neighbours: bool [rows, tokens]."""
    height, width = chosen.shape[1:]
    rows = torch.arange(scale.height, device=chosen.device) * height // scale.height
    columns = torch.arange(scale.width, device=chosen.device) * width // scale.width
    return chosen[:, rows][:, :, columns].flatten(1)
