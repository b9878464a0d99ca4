"""HACK: contextual heads need few tokens, structural heads many (AAAI 2026, arXiv:2504.09261)."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import Family, ModelSpec, Segment
from kvbench.methods.hack.classes import ColumnVariance, find_contextual
from kvbench.methods.shared.base import SHARE, Artifact, Limit, Method, Observer, require_artifact, set_limits
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
    """Heads in two classes with a budget and a policy each; a few spaced queries stand for all of a scale's.

    Contextual heads (the alpha x T of lowest column variance) keep the B_C tokens that receive most attention.
    Structural heads keep the sink scales, the newest scale, and of the rest what receives most, B_S in all; if the
    newest scale does not fit, part of it. alpha B_C + (1 - alpha) B_S is at most B / T.

    Differs from the paper in: its code is not released and B_C : B_S is not given, so it is an option; alpha is that of
    HACK++ for the model, by the same authors. In the paper a head's tokens are cut to its budget before attention, and
    the same set serves the scale being generated and the cache. Here they leave after their layer ran, as with every
    method: the cache is limited and attention is not, so that the paper's numbers contain a loss that ours do not. Its
    budgets are fractions of all tokens, the last scale among them, and what leaves at that scale it merges into what
    stays. What happens when sinks and newest scale exceed B_S it does not say.

    Attributes:
        sinks: leading scales that structural heads never lose; the paper has two (`protect=paper`).
        alpha: share of contextual heads.
        contextual: B_C as a share of B / T.
        observed: evenly spaced queries that stand for all.
        recent: which part of a newest scale that does not fit: `scored` (most attended) or `tail` (last in raster).
        branch_mode: who decides (`select.BranchMode`).
    """

    sinks: int
    alpha: float = 0.2
    contextual: float = 0.2
    observed: int = 32
    recent: Literal["scored", "tail"] = "scored"
    branch_mode: BranchMode = "per_row"

    families: ClassVar[tuple[Family, ...]] = ("next-scale",)
    limits = set_limits(alpha=SHARE, contextual=SHARE, observed=Limit(1))
    revision: ClassVar[int] = 1  # what did not divide was unused

    def needs(self) -> Observer | Path:
        """Return the calibration that sorts heads into classes."""
        return ColumnVariance()

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuse sinks that do not fit (structural heads have at least the mean)."""
        super().check(spec, budget)
        check_capacity(spec, budget, self.sinks)

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Sort the heads into classes and share the budget among these."""
        super().prepare(spec, budget, artifact)
        sigma = require_artifact(artifact, "method=hack:")["sigma"]
        self.is_contextual = find_contextual(sigma, self.alpha)
        classes = self.is_contextual.flatten()
        contextual, structural, left = self._share_budget(spec, budget)
        self.capacities = torch.where(self.is_contextual, contextual, structural)
        # The first structural heads, or the first of all where there is one class, get what does not divide.
        takers = classes.logical_not() if 0 < classes.sum() < len(classes) else torch.ones_like(classes)
        self.capacities.view(-1)[takers.nonzero()[:left, 0]] += 1
        self._layer_capacities = [tuple(row) for row in self.capacities.tolist()]

    def capacity(self, layer: int, segment: Segment) -> tuple[int, ...]:
        """Return the capacity of each head's class."""
        return self._layer_capacities[layer]

    def keep(self, view: View) -> Tensor | None:
        """Keep what the class of each head says, as much as it can hold."""
        device, capacities = view.position.device, self.capacity(view.layer, view.segment)
        if fits(view, min(capacities)):
            return None
        received = view.mass(choose_window("uniform", view.segment, self.observed))
        scores = merge_branches(received, self.branch_mode, self.spec.branches)
        structural = (
            ~self.is_contextual[view.layer].to(device, non_blocking=True).repeat(view.sequences)[:, None]
        )
        # A probability is at most 1, so whole numbers rank the structural heads' groups.
        newest = view.position >= view.segment.start
        if self.recent == "tail":
            raster = (view.position - view.segment.start) / view.segment.length
            scores = torch.where(structural & newest, raster.to(scores), scores)
        scores = scores + structural * (2.0 * newest + 4.0 * (view.segment_ids < self.sinks))
        return choose_best(
            scores.masked_fill(view.position < 0, -torch.inf), spread_capacity(capacities, view)
        )

    def _share_budget(self, spec: ModelSpec, budget: Budget) -> tuple[int, int, int]:
        """Return B_C, B_S in tokens per head and the rest; contextual heads have what structural ones cannot use."""
        heads, full = spec.all_heads, spec.cached_length
        few = round(self.alpha * heads)
        if few in (0, heads):
            return budget.head_tokens, budget.head_tokens, budget.tokens % heads
        contextual = max(1, int(self.contextual * budget.per_head))
        contextual = max(contextual, (budget.tokens - (heads - few) * full) // few)
        structural, left = divmod(budget.tokens - few * contextual, heads - few)
        return contextual, *((structural, left) if structural < full else (full, 0))
