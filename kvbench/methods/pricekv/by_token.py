"""PriceKV by token: priced capacities of heads, filled with the positions that later segments are expected to use."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec, Segment
from kvbench.methods.pricekv.curves import keep_best
from kvbench.methods.pricekv.errors import Importance
from kvbench.methods.pricekv.forecast import (
    Condition,
    TokenForecast,
    choose,
    rate_positions,
    rate_slots,
    select_rows,
)
from kvbench.methods.pricekv.sell import choose_floor, sell_by_curves
from kvbench.methods.shared.base import Artifact, Limit, Method, require_artifact, set_limits
from kvbench.methods.shared.select import check_capacity, choose_best, spread_capacity
from kvbench.methods.shared.view import View


@dataclass
class PriceKVByToken(Method):
    """Sell capacity to heads by their calibrated error, and fill it with the positions of the highest forecast.

    A method of this project, the companion of PriceKV whose unit is a token. The same position of an image plays the
    same part in other prompts: heads look at fixed offsets, and the attention that a row or a scale just paid says
    little about what the next ones will need. So the calibration measures, on full caches of other prompts, what each
    position is worth to each later segment (`forecast.TokenForecast`), for each head and each branch of guidance; then
    how far attention's output would be off in a head that holds only so many of the best. Capacity is sold to heads
    after every segment in the order of error saved per token (`sell.allocate_capacities`), deep heads shrink early
    where shallow ones grow, and what is held never exceeds B. The tables hold for positions of images; texts, whose
    words stand elsewhere in every prompt, are refused.

    Without `surprise` and `contrast` nothing is computed while an image is made: what is kept depends on branch, layer,
    head and segment alone. Still the branches differ, so that sequences do not share their layout as those of static
    methods do.

    Attributes:
        importance: what a position is worth: `mass`, the attention that it receives, or `output`, the squared change in
            attention's output without it; null for `mass` in next-token models and `output` in next-scale models.
        floor: tokens that every head holds at least; null for the condition and a row of a next-token model, or three
            fifths of B / T where those are more, and 1 of a next-scale model. Never more than B / T.
        forecast_decay: what a later segment counts in a position's forecast beside the one before it.
        price_decay: the same in the worth of a capacity.
        surprise: how much it counts that a slot receives more attention in this prompt than in others; 0 looks at no
            attention.
        contrast: how much it counts that a slot's value lies far from the others that are held (`forecast.rate_slots`);
            0 looks at no values.
        queries: evenly spaced queries of each segment that the calibration looks at.
        condition: heads keep `tokens` of the condition, or the `block`, whole or hardly at all
            (`forecast.rate_positions`).
        power: of the mean of importance over calibration prompts: 1 is the mean; with larger values, heads keep the
            positions that few prompts need. Null for 8 in next-token models and 1 in next-scale models.
        error_power: the same of the errors by which capacity is sold; below 1, what most prompts lose counts more than
            what few lose. Null for 0.5 in next-token models and 1 in next-scale models.
        calibration_prompts: default of `calibrate.count`; errors of the prompts that the forecast was made of are too
            small where there are few.
    """

    importance: Importance | None = None
    floor: int | None = None
    forecast_decay: float = 0.8
    price_decay: float = 0.8
    surprise: float = 0.0
    queries: int = 64
    condition: Condition = "tokens"
    power: float | None = None
    error_power: float | None = None
    contrast: float = 0.0
    calibration_prompts: int = 40

    limits = set_limits(
        floor=Limit(1),
        forecast_decay=Limit(0, 1),
        price_decay=Limit(0, 1),
        surprise=Limit(0),
        queries=Limit(1),
        power=Limit(1, 32),
        error_power=Limit(0.1, 32),
        contrast=Limit(0),
        calibration_prompts=Limit(1),
    )

    def needs(self) -> TokenForecast:
        """Return the calibration of forecasts and of the errors of heads that follow them."""
        return TokenForecast(
            self.importance,
            self.forecast_decay,
            self.surprise,
            self.queries,
            self.condition,
            self.power,
            self.error_power,
            self.contrast,
        )

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuse texts and less than a token a head."""
        super().check(spec, budget)
        if spec.writes_text:
            raise ValueError(
                f"method=pricekv/by_token: forecasts are for positions of an image, and {spec.name} writes texts; take "
                "method=pricekv/by_score"
            )
        check_capacity(spec, budget)

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Sell the capacity, score the positions, and list those that stay where no data is looked at."""
        super().prepare(spec, budget, artifact)
        tensors = require_artifact(artifact, "method=pricekv/by_token:")
        floor = self.floor or choose_floor(spec, budget)
        self.capacities = sell_by_curves(tensors["error"], spec, budget, floor=floor, decay=self.price_decay)
        importance = choose(spec, self.importance, self.power, self.error_power).importance
        settings = (importance, self.forecast_decay, self.surprise, self.condition)
        scores = rate_positions(tensors, spec, *settings)
        self._table = scores if self._reads_data else self._list_kept(scores)

    @property
    def _reads_data(self) -> bool:
        return bool(self.surprise or self.contrast)

    def capacity(self, layer: int, segment: Segment) -> tuple[int, ...]:
        """Return what was sold to each head."""
        return tuple(self.capacities[segment.index, layer].tolist())

    def keep(self, view: View) -> Tensor:
        """Keep the positions that are listed; with surprise or contrast the slots of the highest scores."""
        exists, table = view.position >= 0, select_rows(self._table[view.segment.index], view)
        of_slots = table.gather(1, view.position.clamp(min=0))
        if not self._reads_data:
            return of_slots & exists
        scores = of_slots + rate_slots(view, self.surprise, self.contrast)
        capacity = spread_capacity(self.capacity(view.layer, view.segment), view)
        return choose_best(scores.masked_fill(~exists, -torch.inf), capacity) & exists

    def _list_kept(self, scores: Sequence[Tensor]) -> list[Tensor]:
        """Return which positions stay after each cached segment, bool [branches, L, H, c_k], by their scores."""
        kept: list[Tensor] = []
        held = None
        for of_segment, capacities in zip(scores, torch.from_numpy(self.capacities), strict=True):
            held = keep_best(of_segment.flatten(0, 2), held, capacities.flatten().repeat(len(of_segment)))
            kept.append(held.unflatten(0, of_segment.shape[:3]))
        return kept
