"""SparVAR: what a middle scale attends to decides what later scales read (arXiv:2602.04361)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import Family, ModelSpec, Segment
from kvbench.methods.shared.base import Artifact, Limit, Method, set_limits
from kvbench.methods.shared.capabilities import SparseReads
from kvbench.methods.shared.select import choose_best
from kvbench.methods.shared.view import View


@dataclass
class SparVAR(SparseReads, Method):
    """Keep everything; later scales attend to what a middle scale attended to, mapped to their own maps.

    At the decision scale every head notes the attention that each token so far receives. Of the scales up to that one,
    later scales attend to its best tokens, a share `density` of them. A scale that comes later, the current one
    included, is read where the map of the decision scale, enlarged to its size, has those tokens. Scales up to `sinks`
    are read whole. Memory is that of the full cache, so the method has no budget; what it saves is reading.

    This is a reading of the abstract and of summaries: block size, decision scale and densities were not at hand, and
    the official repository holds no code. The paper selects blocks of keys for blocks of queries and adds local windows
    across scales; here all queries of a scale and head read the same tokens, and there are no windows. Reads are
    counted (`python -m benchmarks reads`), no time is saved.

    Attributes:
        decision: index of the decision scale; None for the middle one.
        density: share of the tokens up to the decision scale that later scales attend to.
        sinks: leading scales that are read whole.
        strict: stop when a run's budget is exceeded, by what is kept.
    """

    decision: int | None = None
    density: float = 1.0
    sinks: int = 1
    strict: bool = False

    families: ClassVar[tuple[Family, ...]] = ("next-scale",)
    limits = set_limits(
        density=Limit(1e-6, 1, "must lie above 0 and not above 1"), decision=Limit(0), sinks=Limit(0)
    )

    @property
    def budgeted(self) -> bool:
        """Return whether it stops when the budget is exceeded; what it keeps does not depend on it."""
        return self.strict

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuse a decision scale that the model has not."""
        super().check(spec, budget)
        if self.decision is not None and self.decision >= len(spec.segments):
            raise ValueError(f"method.decision={self.decision}: {spec.name} has {len(spec.segments)} scales")

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Find the decision scale."""
        super().prepare(spec, budget, artifact)
        self._decision = spec.segments[len(spec.segments) // 2 if self.decision is None else self.decision]
        self._attended: dict[int, Tensor] = {}

    def capacity(self, layer: int, segment: Segment) -> int:
        """Return the tokens so far: nothing is dropped."""
        return segment.end

    def keep(self, view: View) -> None:
        """Keep everything."""
        return

    def select_attended(self, view: View) -> Tensor | None:
        """Select what the decision scale attended to, bool [rows, slots]; None up to that scale."""
        if view.segment.index < self._decision.index or self.density == 1:
            return None
        if view.segment.index == self._decision.index:
            best = choose_best(view.mass(), max(1, int(self.density * self._decision.end)))
            best[:, : self.spec.leading_tokens(self.sinks)] = True
            self._attended[view.layer] = best
            return None
        attended = self._attended[view.layer]
        own = attended[:, self._decision.start :].unflatten(1, (self._decision.height, self._decision.width))
        later = self.spec.segments[self._decision.index + 1 : view.segment.index + 1]
        chosen = torch.cat((attended, *(enlarge(own, scale) for scale in later)), 1)
        chosen[:, -1] |= ~chosen.any(1)
        return chosen


def enlarge(chosen: Tensor, scale: Segment) -> Tensor:
    """Return the places of a larger map whose nearest place of a smaller one is chosen, bool [rows, scale.length].

    Args:
        chosen: bool [rows, height, width] of the smaller map.
        scale: the larger one.
    """
    height, width = chosen.shape[1:]
    rows = torch.arange(scale.height, device=chosen.device) * height // scale.height
    columns = torch.arange(scale.width, device=chosen.device) * width // scale.width
    return chosen[:, rows][:, :, columns].flatten(1)
