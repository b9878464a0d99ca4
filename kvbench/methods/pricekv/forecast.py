"""Forecast of what each position will be worth to later segments, and the error of heads that follow it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec
from kvbench.methods.pricekv.curves import (
    TINY,
    attend_evenly,
    keep_best,
    list_capacities,
    measure_errors,
    spread_slots,
)
from kvbench.methods.pricekv.errors import Importance, find_metric, square_lengths
from kvbench.methods.shared.base import Artifact, Observer
from kvbench.methods.shared.view import View

EPSILON = 1e-5
"""Attention that is added to all of it before a logarithm."""

SMALL = 1e-9
"""Weight of a position's own forecast where another's is used; it only breaks ties."""
Condition = Literal["tokens", "block"]


@dataclass
class TokenForecast(Observer):
    """Calibrates which positions later segments use, and then what heads lose that hold only the best of them.

    Generations are shown twice. The first pass measures `importance`, float64 [branches, L, H, n]: of each segment but
    the first, one after the other, what every earlier position is worth to it (n = c_0 + ... + c_{K-2}); with surprise
    also `received`, of the same shape, the attention that each position up to the end of a segment receives from it.
    The second pass measures `error`, float64 [L, H, K - 1, capacities]: how far attention's output is off at each
    segment but the first, squared, in heads that hold at most so many tokens (`list_capacities`) after every segment,
    those of the highest scores (`rate_positions`) among what they still have. Attention is that of the full cache,
    without what was dropped. Errors are sums over the query heads that share a head's keys, and power means over
    prompts, branches and queries, E[x^p]^(1/p) with p = `error_power`; importance is one over prompts with p = `power`.

    Attributes:
        importance: `mass`, the attention received, or `output`, the squared change in attention's output without the
            token, to first order; None for `mass` in next-token models and `output` in next-scale models (`choose`).
        decay: see `rate_positions`.
        surprise: see `rate_positions`.
        queries: evenly spaced queries of each segment that are looked at.
        condition: see `rate_positions`.
        power: of the mean of importance over prompts: 1 is the mean, large values come close to the maximum, and see
            positions that few prompts need; None for 8 in next-token models and 1 in next-scale models.
        error_power: of the mean of errors: below 1, what most prompts lose counts more than what few lose; None for 0.5
            in next-token models and 1 in next-scale models.
        contrast: see `rate_slots`.
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
        """Return the shapes of `importance` and `error`, and with surprise of `received`."""
        positions = (spec.branches, spec.layers, spec.heads, sum(spec.ends[:-1]))
        received = {"received": positions} if self.surprise else {}
        error = (spec.layers, spec.heads, len(spec.segments) - 1, len(list_capacities(spec)))
        return {"importance": positions, **received, "error": error}

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Start the sums at zero and the first pass."""
        super().prepare(spec, budget, artifact)
        self._choice = choose(spec, self.importance, self.power, self.error_power)
        self._capacities = list_capacities(spec)
        self._means: dict[str, Tensor] = {}
        self._scores: list[Tensor] = []
        self._kept: dict[int, list[Tensor]] = {}

    def accumulate(self, view: View) -> None:
        """Add the importance of the positions, in the second pass the errors and what is dropped next."""
        if not self._scores:
            self._add_importance(view)
            return
        if view.segment.index:
            self._add_errors(view)
        if not view.segment.last:
            self._drop(view)

    def look_again(self) -> bool:
        """Return whether the first pass just ended; the scores are then known."""
        if self._scores:
            return False
        self._means = {name: mean for name, mean in super().average().items() if name != "error"}
        self._means["importance"] = self._means["importance"].pow(1 / self._choice.power)
        settings = (self._choice.importance, self.decay, self.surprise, self.condition)
        self._scores = rate_positions(self._means, self.spec, *settings)
        self._prompts = 0
        return True

    def average(self) -> dict[str, Tensor]:
        """Return the means over the prompts of each pass."""
        found = super().average() | self._means
        return found | {"error": found["error"].pow(1 / self._choice.error_power)}

    def _add_importance(self, view: View) -> None:
        index, ends = view.segment.index, self.spec.ends
        if self.surprise and not view.segment.last:
            self._add_positions("received", view, view.mass(), sum(ends[:index]), ends[index])
        if index:
            worth = view.mass() if self._choice.importance == "mass" else self._measure_losses(view)
            worth = worth.double().pow(self._choice.power)
            self._add_positions("importance", view, worth, sum(ends[: index - 1]), ends[index - 1])

    def _add_positions(self, name: str, view: View, values: Tensor, start: int, count: int) -> None:
        """Add values of slots [rows, slots] to those of the first `count` positions, which begin at `start`."""
        rows = spread_slots(values, view)[:, :count]
        of_prompts = rows.unflatten(0, (self.spec.branches, -1, self.spec.heads)).sum(1)
        self.sums[name][:, view.layer, :, start : start + count] += of_prompts.double().cpu()

    def _measure_losses(self, view: View) -> Tensor:
        """Return how far each token's loss moves attention's output, squared, to first order: float32 [rows, slots].

        That is E[p^2 |W (v - o)|^2] over queries, of attention p, value v, output o and output projection W.
        """
        attention, values, outputs = attend_evenly(view, self.queries)
        metric = find_metric(view)
        values = values.expand(-1, outputs.shape[1], -1, -1)
        turned, against = (x if metric is None else x @ metric for x in (values, outputs))
        distances = (
            (turned * values).sum(-1)[:, :, None]
            - 2 * (against @ values.mT)
            + (against * outputs).sum(-1, keepdim=True)
        )
        return (attention.square() * distances.clamp(min=0)).mean(2).sum(1)

    def _add_errors(self, view: View) -> None:
        """Add the error of the segment's queries in heads that hold what each capacity leaves."""
        errors = measure_errors(view, self._kept[view.layer], self.queries, self._choice.error_power)
        self.sums["error"][view.layer, :, view.segment.index - 1] += errors / self.spec.branches

    def _drop(self, view: View) -> None:
        """Note which positions each capacity leaves, bool [rows, c_k]; padding counts as if it were there."""
        scores = select_rows(self._scores[view.segment.index], view)
        if self.surprise or self.contrast:
            scores = scores + spread_slots(rate_slots(view, self.surprise, self.contrast), view)
        before = self._kept[view.layer] if view.segment.index else [None] * len(self._capacities)
        self._kept[view.layer] = [
            keep_best(scores, kept, capacity) for kept, capacity in zip(before, self._capacities, strict=True)
        ]


class Choice(NamedTuple):
    """What is calibrated of a model; see the attributes of `TokenForecast`."""

    importance: Importance
    power: float
    error_power: float


def choose(
    spec: ModelSpec, importance: Importance | None, power: float | None, error_power: float | None
) -> Choice:
    """Return what is calibrated of a model: what settings say, and for None what is best for its family."""
    rows = spec.family == "next-token"
    return Choice(
        importance or ("mass" if rows else "output"),
        power or (8.0 if rows else 1.0),
        error_power or (0.5 if rows else 1.0),
    )


def rate_positions(
    tensors: dict[str, Tensor],
    spec: ModelSpec,
    importance: Importance,
    decay: float,
    surprise: float,
    condition: Condition,
) -> list[Tensor]:
    """Return the score of each position after each cached segment, float32 [branches, L, H, c_k].

    The forecast F_k = I_{k+1} + decay x F_{k+1} sums what a position is worth to later segments, the sooner the more;
    of squared outputs it is the root of that. The score is log F_k - surprise x log A_k, of the attention A_k that the
    position receives from segment k in other prompts; surprise x the log of what it receives in a prompt comes to it.

    Args:
        tensors: what a `TokenForecast` measured.
        spec: the model.
        importance: what was measured.
        decay: what a segment counts beside the one before it.
        surprise: how much it counts that a position receives more attention than in other prompts.
        condition: a head keeps `tokens` of the first segment, or the `block`, whose positions all have the forecast of
            the best of them, whole or hardly at all.
    """
    ends = list(spec.ends[:-1])
    worth = tensors["importance"].split(ends, -1)
    received: Sequence[Tensor | None] = [None] * len(ends)
    if surprise:
        received = tensors["received"].split(ends, -1)
    later: Tensor | None = None
    scores = []
    for of_next, attention in zip(reversed(worth), reversed(received), strict=True):
        later = of_next if later is None else of_next + decay * later[..., : of_next.shape[-1]]
        forecast = share_best(later, spec.lengths[0]) if condition == "block" else later
        score = ((forecast if importance == "mass" else forecast.sqrt()) + EPSILON).log()
        if attention is not None:
            score = score - surprise * (attention + EPSILON).log()
        scores.append(score.float())
    return scores[::-1]


def rate_slots(view: View, surprise: float, contrast: float) -> Tensor:
    """Return what this prompt's own data add to the scores of slots, float32 [rows, slots].

    Args:
        view: a layer.
        surprise: weight of the log of the attention that a slot receives; `rate_positions` takes off what it receives
            in other prompts.
        contrast: weight of the log of the distance of a slot's value from the mean of its row's values, through the
            output projection. Where many values are alike, one of them does for the others.
    """
    added = torch.zeros_like(view.position, dtype=torch.float32)
    if surprise:
        added = surprise * (view.mass() + EPSILON).log()
    if contrast:
        exists, values = (view.position >= 0).float()[..., None], view.cached_values().float()
        apart = (values - (values * exists).sum(1, keepdim=True) / exists.sum(1, keepdim=True)) * exists
        squares = square_lengths(apart[:, None], find_metric(view)).mean(1).clamp(min=0)
        share = squares / squares.mean(1, keepdim=True).clamp(min=TINY)
        added = added + contrast / 2 * (share + EPSILON).log()
    return added


def share_best(forecast: Tensor, count: int) -> Tensor:
    """Return a forecast [..., c_k] whose first `count` positions have that of the best of them, in their own order."""
    first = forecast[..., :count]
    return torch.cat((first.amax(-1, keepdim=True) + SMALL * first, forecast[..., count:]), -1)


def select_rows(table: Tensor, view: View) -> Tensor:
    """Return a layer's part of a table of positions [branches, L, H, c_k] for every row, [rows, c_k]."""
    of_branches = table[:, view.layer].to(view.position.device)
    return of_branches.repeat_interleave(view.sequences // len(of_branches), 0).flatten(0, 1)
