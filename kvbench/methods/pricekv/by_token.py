"""PriceKV by token: calibrated capacities of heads, filled with the positions of highest forecast."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec, Segment
from kvbench.methods.pricekv.curves import keep_best
from kvbench.methods.pricekv.errors import Importance
from kvbench.methods.pricekv.forecast import Condition, TokenForecast, rate_slots, select_rows
from kvbench.methods.pricekv.greedy import allocate_calibrated, choose_floor
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.calibration import Artifact, require_artifact
from kvbench.methods.shared.full_scores import list_capacities
from kvbench.methods.shared.limits import Limit, set_limits
from kvbench.methods.shared.select import check_capacity, choose_best, spread_capacity
from kvbench.methods.shared.view import View


@dataclass
class PriceKVByToken(Method):
    """Allocate capacity to heads by their calibrated error, and keep the positions of highest forecast in each head.

    A method of this project, PriceKV with tokens instead of blocks. A position of an image has a similar role in all
    prompts: heads attend to fixed offsets, and the attention of the present row or scale predicts little about the next
    ones. The calibration measures on full caches of other prompts the importance of each position to each later segment
    (`forecast.TokenForecast`), for each head and branch of guidance, and the error of heads that keep a number of the
    best positions. Capacity is allocated after every segment in the order of error saved per token
    (`greedy.allocate_capacities`), and the budget holds after every layer. Texts are refused, since their positions
    have no fixed role.

    Without `surprise` and `contrast` nothing is computed during generation: the kept positions depend only on branch,
    layer, head and segment. The branches differ, so sequences do not share a layout as with static methods.

    Attributes:
        importance: importance of a position: `mass`, the attention that it receives, or `output`, the squared change of
            attention's output without it; null for `mass` in next-token models and `output` in next-scale models.
        floor: minimum capacity of a head, at most B / T; null for `greedy.choose_floor`.
        forecast_decay: discount of importance per segment in a position's forecast.
        price_decay: discount of the error per segment in the cost of a capacity.
        surprise: weight of a slot's attention above its mean over prompts; 0 reads no attention.
        contrast: weight of a value's distance from the other kept values (`forecast.rate_slots`); 0 reads no values.
        queries: number of evenly spaced queries of each segment in the calibration.
        condition: heads keep `tokens` of the condition, or nearly all or none of the `block` (`TokenForecast.rate`).
        power: exponent of the mean of importance over prompts; see `TokenForecast`.
        error_power: exponent of the mean of errors; see `TokenForecast`.
        calibration_prompts: default of `calibrate.count`. With few prompts the errors are too small, because the
            forecast is made of the same prompts.
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
        """Return the calibration of the forecast and its errors."""
        settings = (self.importance, self.forecast_decay, self.surprise, self.queries, self.condition)
        return TokenForecast(*settings, self.power, self.error_power, self.contrast)

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuse texts, and budgets below one token per head."""
        super().check(spec, budget)
        if spec.writes_text:
            raise ValueError(
                f"method=pricekv/by_token: forecasts are for positions of an image, and {spec.name} writes texts; take "
                "method=pricekv/by_score"
            )
        check_capacity(spec, budget)

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Allocate the capacity and score the positions; without surprise and contrast also choose them."""
        super().prepare(spec, budget, artifact)
        tensors = require_artifact(artifact, "method=pricekv/by_token:")
        floor = self.floor or choose_floor(spec, budget)
        self.capacities = allocate_calibrated(
            tensors["error"], list_capacities(spec), spec, budget, floor=floor, decay=self.price_decay
        )
        scores = self.needs().rate(tensors, spec)
        self._table = scores if self._reads_data else self._choose_positions(scores)

    @property
    def _reads_data(self) -> bool:
        return bool(self.surprise or self.contrast)

    def capacity(self, layer: int, segment: Segment) -> tuple[int, ...]:
        """Return the capacity of each head."""
        return tuple(self.capacities[segment.index, layer].tolist())

    def keep(self, view: View) -> Tensor:
        """Keep the chosen positions; with surprise or contrast, the slots of highest score."""
        exists, table = view.position >= 0, select_rows(self._table[view.segment.index], view)
        of_slots = table.gather(1, view.position.clamp(min=0))
        if not self._reads_data:
            return of_slots & exists
        scores = of_slots + rate_slots(view, self.surprise, self.contrast)
        capacity = spread_capacity(self.capacity(view.layer, view.segment), view)
        return choose_best(scores.masked_fill(~exists, -torch.inf), capacity) & exists

    def _choose_positions(self, scores: Sequence[Tensor]) -> list[Tensor]:
        """Return the positions to keep after each cached segment, bool [branches, L, H, c_k], by their scores."""
        masks: list[Tensor] = []
        mask = None
        for of_segment, capacities in zip(scores, torch.from_numpy(self.capacities), strict=True):
            mask = keep_best(of_segment.flatten(0, 2), mask, capacities.flatten().repeat(len(of_segment)))
            masks.append(mask.unflatten(0, of_segment.shape[:3]))
        return masks
