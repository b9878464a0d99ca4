"""Forecast: tokens of the positions that later segments needed in other images, and that this image attends to."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec
from kvbench.methods.pricekv.errors import Importance
from kvbench.methods.shared.calibration import Artifact, Observer, require_artifact
from kvbench.methods.shared.full_scores import scatter_to_positions
from kvbench.methods.shared.limits import SHARE, Limit, set_limits
from kvbench.methods.shared.scored import Scored
from kvbench.methods.shared.utility import attend_evenly, find_metric, square_lengths
from kvbench.methods.shared.view import View

EPSILON = 1e-5
"""Added to attention and forecasts before the logarithm."""

TIE_WEIGHT = 1e-9
"""Weight of a position's own forecast where the best forecast of a block replaces it; only breaks ties."""
Condition = Literal["tokens", "block"]


@dataclass
class PositionImportance(Observer):
    """Calibration of the importance of positions to later segments.

    The tensor `importance` is float64 [branches, L, H, n]: for each segment except the first, in order, the importance
    of every earlier position to it (n = c_0 + ... + c_{K-2}). It is a power mean over prompts, E[x^p]^(1/p). The tensor
    `received`, of the same shape, is the mean attention that each position up to the end of a segment receives from it.

    Attributes:
        importance: `mass`, the attention received, or `output`, the squared change of attention's output without the
            token, to first order; None for `mass` in next-token models and `output` in next-scale models.
        queries: number of evenly spaced queries of each segment.
        power: exponent p of the mean of importance over prompts; above 1, needs of few prompts count more. None for 8
            in next-token models and 1 in next-scale models.
    """

    importance: Importance | None = None
    queries: int = 64
    power: float | None = None

    kind: ClassVar[str] = "position_importance"

    def tensor_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """Return the shapes of `importance` and `received`."""
        positions = (spec.branches, spec.layers, spec.heads, sum(spec.ends[:-1]))
        return {"importance": positions, "received": positions}

    def prepare(self, spec: ModelSpec) -> None:
        """Set the sums to zero."""
        super().prepare(spec)
        self._power = self.power or (8.0 if spec.family == "next-token" else 1.0)

    def is_mass(self, spec: ModelSpec) -> bool:
        """Return whether importance is the attention received, not its effect on the output."""
        return (self.importance or ("mass" if spec.family == "next-token" else "output")) == "mass"

    def accumulate(self, view: View) -> None:
        """Add the importance of earlier positions, and the attention that positions receive."""
        index = view.segment.index
        if not view.segment.last:
            self._add("received", view, view.mass(), index)
        if index:
            importance = view.mass() if self.is_mass(self.spec) else self._measure_losses(view)
            self._add("importance", view, importance.double().pow(self._power), index - 1)

    def average(self) -> dict[str, Tensor]:
        """Return the means over prompts; of importance, the power mean."""
        means = super().average()
        return means | {"importance": means["importance"].pow(1 / self._power)}

    def _add(self, name: str, view: View, values: Tensor, last: int) -> None:
        """Add values of slots [rows, slots] to the sums of the positions up to the end of segment `last`."""
        start, count = sum(self.spec.ends[:last]), self.spec.ends[last]
        rows = scatter_to_positions(values, view)[:, :count]
        of_prompts = rows.unflatten(0, (self.spec.branches, -1, self.spec.heads)).sum(1)
        self.sums[name][:, view.layer, :, start : start + count] += of_prompts.double().cpu()

    def _measure_losses(self, view: View) -> Tensor:
        """Return the squared change of attention's output without each token, to first order: float32 [rows, slots].

        The change is E[p^2 |W (v - o)|^2] over queries, with attention p, value v, output o and output projection W.
        """
        attention, values = attend_evenly(view, self.queries), view.cached_values()[:, None].float()
        outputs, metric = attention @ values, find_metric(view)
        values = values.expand(-1, outputs.shape[1], -1, -1)
        products = (outputs if metric is None else outputs @ metric) @ values.mT
        lengths, of_outputs = square_lengths(values, metric), square_lengths(outputs, metric)
        distances = lengths[:, :, None] - 2 * products + of_outputs[..., None]
        return (attention.square() * distances.clamp(min=0)).mean(2).sum(1)


@dataclass
class Forecast(Scored):
    """Keep the tokens of highest forecast, an even share of B in every head.

    This method is kvbench's own. A position of an image has a similar role in all prompts: heads attend to fixed
    offsets, and the attention of the present row or scale predicts little about later segments. A calibration measures
    the importance I of each position to each later segment, for each head and branch of guidance
    (`PositionImportance`). The forecast after segment k is F_k = I_{k+1} + decay x F_{k+1}, for `output` the square
    root of that. The score of a slot is log F_k + surprise x s, plus the contrast of its value. Its surprise s is the
    sum of log a - log A over the segments since it came, with a factor of `memory` per segment: a is the slot's
    attention in this image, and A is its share of the held slots' mean attention in the calibration. The method refuses
    texts, since their positions have no fixed role.

    Attributes:
        importance: importance of a position, see `PositionImportance`.
        decay: discount of importance per segment.
        surprise: weight of the log of a slot's attention relative to its mean over prompts; None for 0.3 in next-scale
            models and 0.15 in next-token models.
        memory: weight of the surprise at a segment relative to the next segment; None for 1 in next-scale models and 0
            in next-token models.
        contrast: weight of a value's distance from the mean of its row (`measure_contrast`); None for 0 in next-scale
            models and 1 in next-token models.
        queries: number of evenly spaced queries of each segment in the calibration.
        condition: heads keep `tokens` of the condition, or nearly all or none of the `block`, all of whose positions
            then have the forecast of the best position.
        power: exponent of the mean of importance over prompts, see `PositionImportance`.
        calibration_prompts: default of `calibrate.count`.
    """

    importance: Importance | None = None
    decay: float = 0.8
    surprise: float | None = None
    memory: float | None = None
    contrast: float | None = None
    queries: int = 64
    condition: Condition = "tokens"
    power: float | None = None
    calibration_prompts: int = 40

    recordable: ClassVar[bool] = True
    own_state: ClassVar[int] = 1
    same_at_any_capacity: ClassVar[bool] = True
    limits = set_limits(
        decay=SHARE,
        surprise=Limit(0),
        memory=SHARE,
        contrast=Limit(0),
        queries=Limit(1),
        power=Limit(1, 32),
        calibration_prompts=Limit(1),
    )

    def needs(self) -> PositionImportance:
        """Return the calibration of importance."""
        return PositionImportance(self.importance, self.queries, self.power)

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuse models that write texts, and what `Scored` refuses."""
        super().check(spec, budget)
        if spec.writes_text:
            raise ValueError(
                f"method=forecast: forecasts are for positions of an image, and {spec.name} writes texts; use "
                "method=h2o, or method.base=h2o inside another method"
            )

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Compute the forecast of each position and its usual attention."""
        super().prepare(spec, budget, artifact)
        self._forecasts, self._usual = self._rate(require_artifact(artifact, "method=forecast:"), spec)
        is_rows = spec.family == "next-token"
        self._surprise = self.surprise if self.surprise is not None else (0.15 if is_rows else 0.3)
        self._contrast = self.contrast if self.contrast is not None else float(is_rows)
        self._memory = self.memory if self.memory is not None else float(not is_rows)

    def observe(self, view: View) -> None:
        """Update the surprise of slots by the segment's attention."""
        if self._surprise:
            usual = self._of_slots(self._usual, view)
            known = usual if view.exists is None else usual.masked_fill(~view.exists, -torch.inf)
            surprise = (view.mass() + EPSILON).log_().sub_(usual).add_(known.logsumexp(1, keepdim=True))
            view.state.mul_(self._memory).add_(surprise)

    def score(self, view: View) -> Tensor:
        """Return the forecast with surprise and contrast, float32 [rows, slots]."""
        scores = self._of_slots(self._forecasts, view)
        if self._surprise:
            scores = scores + self._surprise * view.state
        return scores + self._contrast * measure_contrast(view) if self._contrast else scores

    def _of_slots(self, tables: list[Tensor], view: View) -> Tensor:
        """Return the values of slots [rows, slots] from tables of positions [branches, L, H, c_k], one per segment."""
        of_branches = tables[view.segment.index][:, view.layer].to(view.position.device)
        if (prompts := view.sequences // len(of_branches)) > 1:
            of_branches = of_branches.repeat_interleave(prompts, 0)
        positions = view.position if view.exists is None else view.position.clamp(min=0)
        return of_branches.flatten(0, 1).gather(1, positions)

    def _rate(self, tensors: dict[str, Tensor], spec: ModelSpec) -> tuple[list[Tensor], list[Tensor]]:
        """Return log F_k and log A_k of each position after each cached segment, float32 [branches, L, H, c_k]."""
        ends, is_mass = list(spec.ends[:-1]), self.needs().is_mass(spec)
        later: Tensor | None = None
        forecasts = []
        for of_next in reversed(tensors["importance"].split(ends, -1)):
            later = of_next if later is None else of_next + self.decay * later[..., : of_next.shape[-1]]
            forecast = share_best(later, spec.lengths[0]) if self.condition == "block" else later
            forecasts.append(((forecast if is_mass else forecast.sqrt()) + EPSILON).log().float())
        usual = [(part + EPSILON).log().float() for part in tensors["received"].split(ends, -1)]
        return forecasts[::-1], usual


def measure_contrast(view: View) -> Tensor:
    """Return the log of each value's distance from the row's mean value, relative to the mean of all distances.

    Distances are through the output projection. The result is float32 [rows, slots]. Among many similar values, one
    can replace the other values.
    """
    exists, values = (view.position >= 0).float()[..., None], view.cached_values().float()
    difference = (values - (values * exists).sum(1, keepdim=True) / exists.sum(1, keepdim=True)) * exists
    squares = square_lengths(difference[:, None], find_metric(view)).mean(1).clamp(min=0)
    relative = squares / squares.mean(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    return (relative + EPSILON).log() / 2


def share_best(forecast: Tensor, count: int) -> Tensor:
    """Give the first `count` positions of a forecast [..., c_k] the best value among them, in their own order."""
    first = forecast[..., :count]
    return torch.cat((first.amax(-1, keepdim=True) + TIE_WEIGHT * first, forecast[..., count:]), -1)
