"""StreamingLLM: attention sinks and a recent window."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.calibration import Artifact
from kvbench.methods.shared.capacities import share_evenly
from kvbench.methods.shared.limits import Limit, set_limits
from kvbench.methods.shared.select import check_capacity, spread_capacity
from kvbench.methods.shared.view import View


@dataclass
class StreamingLLM(Method):
    """Keep the tokens of the leading segments and the most recent tokens (arXiv:2309.17453).

    Heads share B evenly: the sinks first, then the latest positions. AMS-KV calls this STA; without sinks it is the
    sliding window SWA (arXiv:2004.05150). With the condition as sinks it is the cache of DiagonalAttn
    (arXiv:2609.19702): the prompt, the latest N_r image tokens and, in its variant "+ sink4", the first four.

    Differs from the papers in: sinks are whole segments instead of four tokens, and keys keep the rotation of their own
    position (two-dimensional positions have no shifted counterpart). DiagonalAttn reads only N_att of the N_r stored
    tokens and skips a list of offsets for each head. This saves time but no memory, because later queries read what one
    query skips, so it is left out of a comparison at equal memory.

    Attributes:
        sinks: leading segments that are always kept; 0 for a sliding window.
        leading: tokens right after the sinks that are always kept.
    """

    sinks: int
    leading: int = 0

    static: ClassVar[bool] = True
    limits = set_limits(leading=Limit(0))
    revision: ClassVar[int] = 2  # before, padding in front of a prompt reduced what is kept

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuse more sinks than the model has, and a budget below them or below one token per head."""
        super().check(spec, budget)
        check_capacity(spec, budget, self.sinks, self.leading)

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Share the budget evenly among heads, sinks included."""
        super().prepare(spec, budget, artifact)
        self._sinks = spec.leading_tokens(self.sinks) + self.leading
        self._capacities = share_evenly(budget.tokens, spec)

    def keep(self, view: View) -> Tensor:
        """Keep the sinks and the latest tokens, bool [rows, slots]."""
        capacity = spread_capacity(self._capacities[view.layer], view)
        first = view.segment.end - (capacity - self._sinks)
        latest = view.position >= (first if isinstance(first, int) else first[:, None])
        return (view.position < self._sinks) | latest
