"""HACK: small budgets for contextual heads, large budgets for structural heads (AAAI 2026, arXiv:2504.09261)."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import Family, ModelSpec, Segment
from kvbench.methods.hack.classes import ColumnVariance, find_contextual
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.calibration import Artifact, Observer, require_artifact
from kvbench.methods.shared.limits import SHARE, Limit, set_limits
from kvbench.methods.shared.select import (
    BranchMode,
    check_capacity,
    choose_best,
    choose_window,
    fits,
    merge_branches,
    spread_capacity,
)
from kvbench.methods.shared.view import View


@dataclass
class HACK(Method):
    """Give contextual and structural heads separate budgets and policies, by the attention of a few spaced queries.

    Contextual heads (the alpha x T of lowest column variance) keep the B_C tokens that receive most attention.
    Structural heads keep B_S tokens: the sink scales, the newest scale or a part of it, and the tokens that receive
    most attention among the rest. alpha B_C + (1 - alpha) B_S is at most B / T.

    Differs from the paper in: its code is not released and B_C : B_S is not given, so it is an option; alpha is taken
    from HACK++ for the model, by the same authors. The paper cuts a head's tokens to its budget before attention, so
    its results include a loss of the scale being generated; here tokens are evicted after their layer ran, as with
    every method, and only the cache is limited. The paper's budgets are fractions of all tokens, including the last
    scale, at which it merges evicted tokens into kept tokens. It does not define the case of sinks and newest scale
    larger than B_S.

    Attributes:
        sinks: number of leading scales that structural heads never evict; two in the paper (`protect=paper`).
        alpha: share of contextual heads.
        contextual: B_C as a share of B / T.
        observed: number of evenly spaced queries that represent all.
        recent: part of the newest scale that is kept if it does not fit: `scored` (most attended) or `tail` (last in
            raster order).
        branch_mode: how branches are merged (`select.BranchMode`).
    """

    sinks: int
    alpha: float = 0.2
    contextual: float = 0.2
    observed: int = 32
    recent: Literal["scored", "tail"] = "scored"
    branch_mode: BranchMode = "per_row"

    recordable: ClassVar[bool] = True
    families: ClassVar[tuple[Family, ...]] = ("next-scale",)
    limits = set_limits(alpha=SHARE, contextual=SHARE, observed=Limit(1))
    revision: ClassVar[int] = 1  # before, the remainder of the division was unused

    def needs(self) -> Observer | Path:
        """Return the calibration of the classes."""
        return ColumnVariance()

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuse sinks that exceed B / T, the minimum capacity of structural heads."""
        super().check(spec, budget)
        check_capacity(spec, budget, self.sinks)

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Classify the heads and share the budget among the classes."""
        super().prepare(spec, budget, artifact)
        sigma = require_artifact(artifact, "method=hack:")["sigma"]
        self.is_contextual = find_contextual(sigma, self.alpha)
        classes = self.is_contextual.flatten()
        contextual, structural, remainder = self._share_budget(spec, budget)
        self.capacities = torch.where(self.is_contextual, contextual, structural)
        # The first structural heads, or the first heads if there is one class, get the remainder.
        receivers = classes.logical_not() if 0 < classes.sum() < len(classes) else torch.ones_like(classes)
        self.capacities.view(-1)[receivers.nonzero()[:remainder, 0]] += 1
        self._layer_capacities = [tuple(row) for row in self.capacities.tolist()]

    def capacity(self, layer: int, segment: Segment) -> tuple[int, ...]:
        """Return the capacity of each head of a layer, by its class."""
        return self._layer_capacities[layer]

    def keep(self, view: View) -> Tensor | None:
        """Keep each head's best tokens by the policy of its class, bool [rows, slots]; None while everything fits."""
        device, capacities = view.position.device, self.capacity(view.layer, view.segment)
        if fits(view, min(capacities)):
            return None
        received = view.mass(choose_window("uniform", view.segment, self.observed))
        scores = merge_branches(received, self.branch_mode, self.spec.branches)
        contextual = self.is_contextual[view.layer].to(device, non_blocking=True)
        structural = ~contextual.repeat(view.sequences)[:, None]
        # Probabilities are at most 1, so added integers rank the groups of tokens of structural heads.
        newest = view.position >= view.segment.start
        if self.recent == "tail":
            raster = (view.position - view.segment.start) / view.segment.length
            scores = torch.where(structural & newest, raster.to(scores), scores)
        scores = scores + structural * (2.0 * newest + 4.0 * (view.segment_ids < self.sinks))
        return choose_best(
            scores.masked_fill(view.position < 0, -torch.inf), spread_capacity(capacities, view)
        )

    def _share_budget(self, spec: ModelSpec, budget: Budget) -> tuple[int, int, int]:
        """Return B_C, B_S and the remainder in tokens; contextual heads get what structural heads cannot use."""
        heads, full = spec.all_heads, spec.cached_length
        count = round(self.alpha * heads)
        if count in (0, heads):
            return budget.head_tokens, budget.head_tokens, budget.tokens % heads
        contextual = max(1, int(self.contextual * budget.per_head))
        contextual = max(contextual, (budget.tokens - (heads - count) * full) // count)
        structural, remainder = divmod(budget.tokens - count * contextual, heads - count)
        return contextual, *((structural, remainder) if structural < full else (full, 0))
