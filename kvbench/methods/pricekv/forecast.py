"""Forecast of the importance of positions to later segments, and the error of heads that keep the best positions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.core.segments import ModelSpec
from kvbench.methods.pricekv.curves import (
    TINY,
    attend_evenly,
    keep_best,
    measure_errors,
)
from kvbench.methods.pricekv.errors import Importance
from kvbench.methods.shared.calibration import Observer
from kvbench.methods.shared.full_scores import list_capacities, scatter_to_positions
from kvbench.methods.shared.output_norms import find_metric, square_lengths
from kvbench.methods.shared.view import View

EPSILON = 1e-5
"""Added to attention and forecasts before a logarithm."""

TIE_WEIGHT = 1e-9
"""Weight of a position's own forecast where the best of a block replaces it; only breaks ties."""
Condition = Literal["tokens", "block"]


@dataclass
class TokenForecast(Observer):
    """Calibrates the importance of positions to later segments, then the errors of heads that keep the best positions.

    The calibration has two passes. The first measures `importance`, float64 [branches, L, H, n]: for each segment but
    the first, in order, the importance of every earlier position to it (n = c_0 + ... + c_{K-2}); with surprise also
    `received`, of the same shape, the attention that each position up to the end of a segment receives from it. The
    second measures `error`, float64 [L, H, K - 1, capacities]: the squared error of attention's output at each segment
    but the first if a head keeps, after every segment, the positions of highest score (`rate`) among those it still
    has, up to a capacity (`list_capacities`). Attention is computed on the full cache and masked. Errors are sums over
    the query heads of a KV head, and power means over prompts, branches and queries, E[x^p]^(1/p) with
    p = `error_power`; importance is a power mean over prompts with p = `power`.

    Attributes:
        importance: `mass`, the attention received, or `output`, the squared change of attention's output without the
            token, to first order; None for `mass` in next-token models and `output` in next-scale models.
        decay: discount of importance per segment, see `rate`.
        surprise: weight of attention above its mean over prompts, see `rate`.
        queries: number of evenly spaced queries of each segment.
        condition: see `rate`.
        power: exponent of the mean of importance over prompts. 1 is the mean; large values approach the maximum, which
            includes positions that few prompts need. None for 8 in next-token models and 1 in next-scale models.
        error_power: exponent of the mean of errors; below 1, errors of few prompts count less. None for 0.5 in
            next-token models and 1 in next-scale models.
        contrast: weight of a value's distance from the mean, see `rate_slots`.
    """

    importance: Importance | None = None
    decay: float = 0.8
    surprise: float = 0.0
    queries: int = 64
    condition: Condition = "tokens"
    power: float | None = None
    error_power: float | None = None
    contrast: float = 0.0

    kind: ClassVar[str] = "token_forecast"

    def tensor_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """Return the shapes of `importance`, `error` and, with surprise, `received`."""
        positions = (spec.branches, spec.layers, spec.heads, sum(spec.ends[:-1]))
        received = {"received": positions} if self.surprise else {}
        error = (spec.layers, spec.heads, len(spec.segments) - 1, len(list_capacities(spec)))
        return {"importance": positions, **received, "error": error}

    def prepare(self, spec: ModelSpec) -> None:
        """Set the sums to zero and start the first pass."""
        super().prepare(spec)
        self._importance, self._power, self._error_power = self._resolve(spec)
        self._capacities = list_capacities(spec)
        self._means: dict[str, Tensor] = {}
        self._scores: list[Tensor] = []
        self._masks: dict[int, list[Tensor]] = {}

    def accumulate(self, view: View) -> None:
        """Add the importance of positions in the first pass, and errors in the second."""
        if not self._scores:
            self._add_importance(view)
            return
        if view.segment.index:
            errors = measure_errors(view, self._masks[view.layer], self.queries, self._error_power)
            self.sums["error"][view.layer, :, view.segment.index - 1] += errors / self.spec.branches
        if not view.segment.last:
            self._evict(view)

    def look_again(self) -> bool:
        """Return whether the first pass just ended, and compute the scores for the second."""
        if self._scores:
            return False
        self._means = {name: mean for name, mean in super().average().items() if name != "error"}
        self._means["importance"] = self._means["importance"].pow(1 / self._power)
        self._scores = self.rate(self._means, self.spec)
        self._prompts = 0
        return True

    def average(self) -> dict[str, Tensor]:
        """Return the means over the prompts of each pass."""
        means = super().average() | self._means
        return means | {"error": means["error"].pow(1 / self._error_power)}

    def rate(self, tensors: dict[str, Tensor], spec: ModelSpec) -> list[Tensor]:
        """Return the score of each position after each cached segment, float32 [branches, L, H, c_k].

        The forecast F_k = I_{k+1} + decay x F_{k+1} is the discounted importance to all later segments; for `output`,
        the square root of that. The score is log F_k - surprise x log A_k, where A_k is the attention that the position
        receives from segment k in the calibration; `rate_slots` adds the attention in the present prompt.

        With `condition` = `block`, all positions of the first segment have the forecast of the best one, so that heads
        keep nearly all or nearly none of them.
        """
        ends = list(spec.ends[:-1])
        importance = tensors["importance"].split(ends, -1)
        received: Sequence[Tensor | None] = [None] * len(ends)
        if self.surprise:
            received = tensors["received"].split(ends, -1)
        is_mass = self._resolve(spec)[0] == "mass"
        later: Tensor | None = None
        scores = []
        for of_next, attention in zip(reversed(importance), reversed(received), strict=True):
            later = of_next if later is None else of_next + self.decay * later[..., : of_next.shape[-1]]
            forecast = share_best(later, spec.lengths[0]) if self.condition == "block" else later
            score = ((forecast if is_mass else forecast.sqrt()) + EPSILON).log()
            if attention is not None:
                score = score - self.surprise * (attention + EPSILON).log()
            scores.append(score.float())
        return scores[::-1]

    def _resolve(self, spec: ModelSpec) -> tuple[Importance, float, float]:
        """Return importance, power and error power, with the family's default for None."""
        rows = spec.family == "next-token"
        return (
            self.importance or ("mass" if rows else "output"),
            self.power or (8.0 if rows else 1.0),
            self.error_power or (0.5 if rows else 1.0),
        )

    def _add_importance(self, view: View) -> None:
        index, ends = view.segment.index, self.spec.ends
        if self.surprise and not view.segment.last:
            self._add_positions("received", view, view.mass(), sum(ends[:index]), ends[index])
        if index:
            importance = view.mass() if self._importance == "mass" else self._measure_losses(view)
            importance = importance.double().pow(self._power)
            self._add_positions("importance", view, importance, sum(ends[: index - 1]), ends[index - 1])

    def _add_positions(self, name: str, view: View, values: Tensor, start: int, count: int) -> None:
        """Add values of slots [rows, slots] to the sums of the first `count` positions, which begin at `start`."""
        rows = scatter_to_positions(values, view)[:, :count]
        of_prompts = rows.unflatten(0, (self.spec.branches, -1, self.spec.heads)).sum(1)
        self.sums[name][:, view.layer, :, start : start + count] += of_prompts.double().cpu()

    def _measure_losses(self, view: View) -> Tensor:
        """Return the squared change of attention's output without each token, to first order: float32 [rows, slots].

        The change is E[p^2 |W (v - o)|^2] over queries, with attention p, value v, output o and output projection W.
        """
        attention, values, outputs = attend_evenly(view, self.queries)
        metric = find_metric(view)
        values = values.expand(-1, outputs.shape[1], -1, -1)
        projected_values, projected_outputs = (x if metric is None else x @ metric for x in (values, outputs))
        distances = (
            (projected_values * values).sum(-1)[:, :, None]
            - 2 * (projected_outputs @ values.mT)
            + (projected_outputs * outputs).sum(-1, keepdim=True)
        )
        return (attention.square() * distances.clamp(min=0)).mean(2).sum(1)

    def _evict(self, view: View) -> None:
        """Update the mask of positions of each capacity, bool [rows, c_k]; padding counts as tokens."""
        scores = select_rows(self._scores[view.segment.index], view)
        if self.surprise or self.contrast:
            scores = scores + scatter_to_positions(rate_slots(view, self.surprise, self.contrast), view)
        before = self._masks[view.layer] if view.segment.index else [None] * len(self._capacities)
        self._masks[view.layer] = [
            keep_best(scores, mask, capacity) for mask, capacity in zip(before, self._capacities, strict=True)
        ]


def rate_slots(view: View, surprise: float, contrast: float) -> Tensor:
    """Return the part of the scores of slots that depends on the present prompt, float32 [rows, slots].

    Args:
        view: a layer.
        surprise: weight of the log of the attention that a slot receives.
        contrast: weight of the log of the distance of a slot's value from the mean value of its row, through the output
            projection. Among many similar values, one can replace the others.
    """
    added = torch.zeros_like(view.position, dtype=torch.float32)
    if surprise:
        added = surprise * (view.mass() + EPSILON).log()
    if contrast:
        exists, values = (view.position >= 0).float()[..., None], view.cached_values().float()
        difference = (values - (values * exists).sum(1, keepdim=True) / exists.sum(1, keepdim=True)) * exists
        squares = square_lengths(difference[:, None], find_metric(view)).mean(1).clamp(min=0)
        relative = squares / squares.mean(1, keepdim=True).clamp(min=TINY)
        added = added + contrast / 2 * (relative + EPSILON).log()
    return added


def share_best(forecast: Tensor, count: int) -> Tensor:
    """Give the first `count` positions of a forecast [..., c_k] the best value among them, in their own order."""
    first = forecast[..., :count]
    return torch.cat((first.amax(-1, keepdim=True) + TIE_WEIGHT * first, forecast[..., count:]), -1)


def select_rows(table: Tensor, view: View) -> Tensor:
    """Return the rows of a layer, [rows, c_k], from a table of positions [branches, L, H, c_k]."""
    of_branches = table[:, view.layer].to(view.position.device)
    return of_branches.repeat_interleave(view.sequences // len(of_branches), 0).flatten(0, 1)
