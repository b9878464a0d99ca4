"""PriceKV: calibrated capacities of heads, filled with the tokens that another method scores highest."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec
from kvbench.methods.pricekv.greedy import allocate_calibrated, choose_floor, raise_floors
from kvbench.methods.shared.capacities import Ints
from kvbench.methods.shared.full_scores import (
    CalibratedCapacities,
    FullScores,
    find_existing,
    find_min_capacity,
    list_capacities,
)
from kvbench.methods.shared.limits import SHARE, Limit, set_limits
from kvbench.methods.shared.select import choose_best, choose_window
from kvbench.methods.shared.utility import attend_evenly, find_metric, measure_lost_utility, square_lengths
from kvbench.methods.shared.view import View

DISTANT = 128
"""Minimum distance, in tokens, of a token that a query retrieves; chosen by kvbench."""
CONTRAST = 4
"""Factor on a segment's mean attention to a token above which attention counts as retrieval; chosen by kvbench."""


@dataclass
class ScoreErrors(FullScores):
    """Calibration of the error of heads that hold only the tokens that another method scores highest.

    The tensor `error` is float64 [L, H, segments, capacities]: the squared error of attention's output at each segment
    except the first if a head keeps, after every segment, the best-scored of its remaining tokens up to a capacity
    (`full_scores.list_capacities`). It is a sum over the query heads of a KV head, and a power mean over prompts,
    branches and queries, E[x^p]^(1/p) with p = `error_power`. Texts have one curve for all segments, since they may end
    at any length. Scores are computed on the full cache, with the same capacity for all heads.

    The tensor `retrieval` is float64 [L, H], `measure_retrieval` summed over segments.

    Attributes:
        error: `output`: as above; `oracle`: the summed utility of the tokens that a head does not hold
            (`utility.measure_lost_utility`), the loss of LU-KV.
        error_power: exponent of the mean of squared errors; below 1, rare errors count less. None for 0.5 in next-token
            image models and 1 elsewhere.
        retrieval: whether to measure `retrieval`.
    """

    error: Literal["output", "oracle"] = "output"
    error_power: float | None = None
    retrieval: bool = False

    kind: ClassVar[str] = "score_errors"

    def own_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """Return the shapes of `error` and `retrieval`."""
        curves = 1 if spec.writes_text else len(spec.segments) - 1
        shapes = {"error": (spec.layers, spec.heads, curves, len(list_capacities(spec)))}
        return shapes | ({"retrieval": (spec.layers, spec.heads)} if self.retrieval else {})

    def prepare(self, spec: ModelSpec) -> None:
        """Set the sums to zero, and start the base's calibration if it has one."""
        super().prepare(spec)
        is_rows = spec.family == "next-token" and not spec.writes_text
        self._power = 1.0 if self.error == "oracle" else self.error_power or (0.5 if is_rows else 1.0)
        self._masks: dict[int, list[Tensor]] = {}

    def measure(self, view: View) -> None:
        """Add the errors of a segment, and update the masks."""
        if view.segment.index:
            masks, attention = self._masks[view.layer], attend_evenly(view, self.queries)
            if self.error == "output":
                errors = measure_errors(view, masks, attention, self._power)
            else:
                errors = measure_lost_utility(view, masks, attention)
            curve = 0 if self.spec.writes_text else view.segment.index - 1
            self.sums["error"][view.layer, :, curve] += errors / self.spec.branches
            if self.retrieval:
                self.sums["retrieval"][view.layer] += measure_retrieval(view, attention)
        if not view.segment.last:
            self._evict(view)

    def average(self) -> dict[str, Tensor]:
        """Return the means over prompts, and the tensors of the base's calibration."""
        means = super().average()
        return means | {"error": means["error"].pow(1 / self._power)}

    def _evict(self, view: View) -> None:
        """Update the mask of positions of each capacity, bool [rows, c_k]."""
        exists = find_existing(view)
        before = self._masks[view.layer] if view.segment.index else [None] * len(self._capacities)
        shared = self.rank(view, 0) if self.base.same_at_any_capacity else None
        self._masks[view.layer] = [
            exists
            if capacity >= view.segment.end
            else keep_best(self.rank(view, number) if shared is None else shared, mask, capacity)
            for number, (mask, capacity) in enumerate(zip(before, self._capacities, strict=True))
        ]


@dataclass
class PriceKV(CalibratedCapacities):
    """Allocate capacity to heads by their calibrated error, and keep the tokens that the base scores highest.

    This method is kvbench's own. Heads differ in how many tokens they need: some attend to the newest tokens only,
    others anywhere. The calibration measures, on full caches of other prompts, the error of attention's output if a
    head holds a number of the tokens of highest score (`ScoreErrors`). Capacity is allocated after every segment in the
    order of error saved per token (`greedy.allocate_calibrated`), the budget holds after every layer, and the base
    chooses the tokens: in images the positions of highest forecast (`forecast.Forecast`), in texts, whose positions
    have no fixed role, the tokens of highest accumulated attention (`h2o`). Loss curves on full caches, their hulls
    and the greedy sale are LU-KV's (arXiv:2602.08585), whose loss sums attention and which compresses a prompt once.

    A token that no query has asked for yet has a low score, and a fact in it is lost. With `retrieval`, heads that look
    up distant tokens (retrieval heads, arXiv:2404.15574) hold all of them, as in RazorAttention (arXiv:2407.15891) and
    DuoAttention (arXiv:2410.10819), which find them by repeated random tokens and by training.

    Attributes:
        floor: minimum capacity of a head, at most B / T and at least what the base needs; null for
            `greedy.choose_floor`.
        price_decay: discount of the error per segment in the cost of a capacity.
        queries: number of evenly spaced queries of each segment in the calibration.
        error: loss of a capacity, `output` or `oracle` (`ScoreErrors`).
        error_power: exponent of its mean (`ScoreErrors`).
        retrieval: share of B for the heads of highest retrieval score (`measure_retrieval`), which hold whole
            texts; the other heads share the rest.
        calibration_prompts: default of `calibrate.count`.
    """

    floor: int | None = None
    price_decay: float = 0.8
    queries: int = 64
    error: Literal["output", "oracle"] = "output"
    error_power: float | None = None
    retrieval: float = 0.0
    calibration_prompts: int = 10

    revision: ClassVar[int] = 3  # up to 2, this name was that of PriceKVBlocks
    limits = set_limits(
        floor=Limit(1),
        price_decay=SHARE,
        queries=Limit(1),
        error_power=Limit(0.1, 32),
        retrieval=SHARE,
        calibration_prompts=Limit(1),
    )

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuse `retrieval` in image models, whose positions have fixed roles."""
        super().check(spec, budget)
        if self.retrieval and not spec.writes_text:
            raise ValueError(
                f"method.retrieval={self.retrieval}: for language models; set method.retrieval=0"
            )

    def needs(self) -> ScoreErrors:
        """Return the calibration of the errors, which includes the base's calibration."""
        return ScoreErrors(self.base, self.queries, self.error, self.error_power, self.retrieval > 0)

    def allocate(self, tensors: dict[str, Tensor], spec: ModelSpec, budget: Budget) -> Ints:
        """Return the capacity of each head after each cached segment, int64 [K - 1, L, H]."""
        lowest = max(self.floor or choose_floor(spec, budget), find_min_capacity(self.base, spec))
        least = min(lowest, budget.head_tokens)
        floor = raise_floors(least, tensors.get("retrieval"), self.retrieval, spec, budget)
        measured = list_capacities(self.calibrated_spec)
        return allocate_calibrated(
            tensors["error"], measured, spec, budget, floor=floor, decay=self.price_decay
        )


def measure_errors(view: View, masks: Sequence[Tensor], attention: Tensor, power: float) -> Tensor:
    """Return the squared error of attention's output if heads hold only a part of the past: float64 [H, capacities].

    Attention of some queries (`utility.attend_evenly`) to the full cache, after any segment except the first, is masked
    and renormalised; the segment's own tokens are always included. `masks`, bool [rows, c_(k-1)], mark the past
    positions that are held at each capacity. The error is summed over the query heads of a KV head, raised to the power
    `power` and averaged over queries. The result is summed over sequences, and on the CPU.
    """
    values = view.cached_values()[:, None].float()
    outputs = attention @ values
    metric, current = find_metric(view), view.position >= view.segment.start
    past = view.position.clamp(0, view.segment.start - 1)
    errors = []
    for mask in masks:
        masked = attention * (mask.gather(1, past) | current)[:, None, None]
        total = masked.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        difference = (masked @ values) / total - outputs
        of_heads = square_lengths(difference, metric).sum(1).clamp(min=0).double().pow(power)
        errors.append(of_heads.mean(1).unflatten(0, (-1, view.heads)).sum(0).cpu())
    return torch.stack(errors, 1)


def keep_best(scores: Tensor, mask: Tensor | None, capacity: int | Tensor) -> Tensor:
    """Return the mask of the best positions after a segment, among the stored positions and the segment's own.

    Scores and result are [rows, c_k]; the mask before the segment is [rows, c_(k-1)], None before the first segment.
    """
    candidates = torch.ones_like(scores, dtype=torch.bool)
    if mask is not None:
        candidates[:, : mask.shape[1]] = mask
    return choose_best(scores.masked_fill(~candidates, -torch.inf), capacity) & candidates


def measure_retrieval(view: View, attention: Tensor) -> Tensor:
    """Return how much heads retrieve in a segment, float64 [H] on the CPU, a sum over sequences.

    The score of a query is its attention to each token at least `DISTANT` earlier, less `CONTRAST` times the segment's
    mean attention to the token, summed where positive. It is averaged over queries and query heads. A retrieval head
    attends to different distant tokens at each query; first tokens, punctuation and a diffuse past receive equal
    attention from all queries. Attention is of evenly spaced queries of the segment (`utility.attend_evenly`).
    """
    chosen = choose_window("uniform", view.segment, attention.shape[2]).to(view.position.device)
    distant = view.position[:, None] <= (view.segment.start + chosen - DISTANT)[:, None]
    above = (attention - CONTRAST * attention.mean(2, keepdim=True)).clamp(min=0) * distant[:, None]
    return above.sum(-1).mean((1, 2)).double().unflatten(0, (-1, view.heads)).sum(0).cpu()
