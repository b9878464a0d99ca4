"""PriceKV by rank: priced capacities of heads, filled by a forecast of positions and a scored method together."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.config import ConfigError
from kvbench.core.segments import ModelSpec, Segment
from kvbench.methods.base import Artifact, Limit, set_limits
from kvbench.methods.pricekv.by_token import PriceKVByToken
from kvbench.methods.pricekv.forecast import TokenForecast
from kvbench.methods.select import choose_best, spread_capacity
from kvbench.methods.view import View
from kvbench.methods.wrapper import Wrapper


@dataclass(kw_only=True)
class PriceKVByRank(Wrapper):
    """Keep, in each head's priced capacity, the slots whose ranks in two orders have the largest sum.

    A method of this project. The forecast of `PriceKVByToken` knows what a position was worth to each head in other
    prompts, and looks at no data; a scored method (`base`) looks at this prompt alone. Their scores have no common
    unit, so that each puts the slots of a row in order, and ranks are added (Borda's count):

        r(slot) = rank in the forecast + weight x rank under the base.

    Capacities are those that `PriceKVByToken` sells to heads. Sinks of the base may leave: the forecast rates them.

    Attributes:
        forecast: sells capacities and rates positions.
        weight: how much the base's ranks count; 0 for the forecast alone.
        calibration_prompts: default of `calibrate.count`.

    Raises:
        ConfigError: the base needs a calibration of its own.
    """

    forecast: PriceKVByToken
    weight: float = 1.0
    calibration_prompts: int = 40

    limits = set_limits(weight=Limit(0), calibration_prompts=Limit(1))

    def __post_init__(self) -> None:
        """Check the base."""
        super().__post_init__()
        if self.base.needs() is not None:
            raise ConfigError(
                f"method.base: {type(self.base).__name__} needs a calibration or a file of its own; choose a method "
                "that needs none, as method.base=lagkv"
            )
        self.sinks = 0

    def needs(self) -> TokenForecast:
        """Return the forecast's calibration."""
        return self.forecast.needs()

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuse what the base or the forecast refuses."""
        super().check(spec, budget)
        self.forecast.check(spec, budget)

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Sell the capacity, and set up the base."""
        super().prepare(spec, budget)
        self.forecast.prepare(spec, budget, artifact)

    def share(self, layer: int, segment: Segment) -> tuple[int, ...]:
        """Return what was sold to each head."""
        return self.forecast.capacity(layer, segment)

    def capacity(self, layer: int, segment: Segment) -> tuple[int, ...]:
        """Return what was sold to each head."""
        return self.share(layer, segment)

    def min_capacity(self, view: View) -> int:
        """Return the capacity of the layer's head that has least."""
        return min(self.share(view.layer, view.segment))

    def rank(self, view: View) -> Tensor:
        """Return the weighted sum of ranks, float64 [rows, slots]; -inf where a row has no such slot."""
        exists = view.position >= 0
        both = [
            rank_slots(scores.masked_fill(~exists, -torch.inf))
            for scores in (self.forecast.rate(view), self.base.rate(view))
        ]
        return (both[0] + self.weight * both[1]).masked_fill(~exists, -torch.inf)

    def choose(self, view: View, ranked: Tensor) -> Tensor:
        """Choose the slots of highest sum, as many as each head may hold."""
        capacity = spread_capacity(self.share(view.layer, view.segment), view)
        return choose_best(ranked, capacity) & (ranked > -torch.inf)


def rank_slots(scores: Tensor) -> Tensor:
    """Return the rank of every slot in its row, float64 [rows, slots]: 0 for the lowest score, or first of equals."""
    return scores.argsort(dim=1, stable=True).argsort(dim=1, stable=True).double()
