"""HACK++: budgets by what later scales rely on, for attention and for the cache (arXiv:2606.08302)."""

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import Family, ModelSpec, Segment
from kvbench.methods.hack.budgets import group_heads, measure_reliance, share_budget, weigh_groups
from kvbench.methods.hack.classes import HeadPatterns, find_contextual
from kvbench.methods.shared.base import SHARE, Artifact, Limit, Observer, require_artifact, set_limits
from kvbench.methods.shared.capabilities import SparseReads
from kvbench.methods.shared.scored import Scored
from kvbench.methods.shared.select import choose_best, choose_window, fits, smooth
from kvbench.methods.shared.view import View

Structural = Literal["prior_value", "prior", "value", "attention"]


@dataclass
class HACKPlusPlus(SparseReads, Scored):
    """Heads in two classes, scored by attention or by a prior; budgets for heads that later scales rely on.

    Contextual heads (the alpha x T of lowest column variance) score a token by the attention that a few spaced queries
    of the newest scale pay to it, the maximum of its neighbours'. Structural heads score it by the attention per token
    that their queries paid to its scale in the calibration, times the norm of its value. After every scale each head
    keeps its best tokens. B is shared among heads of one class and layer, for every scale, in proportion to
    (reliance)^tau: the attention per past token that all later scales pay. The paper protects no token (`sinks`).

    `attention_budget` is the paper's first phase: of the same scores, each head attends to its best tokens alone while
    a scale is generated, the scale's own among them, and the cache forgets nothing by it. It costs quality and saves
    attention's work, not memory. Without it the method is the paper's cache compression by itself (its Table X).

    Differs from the paper in: its budgets are fractions of all tokens, the last scale among them, ours of what is
    cached (docs/tables.md). Which rows are calibrated, how wide maxima are, and what becomes of shares that a head
    cannot fill or that are not whole is not said: conditional rows, 5, and water-filling with at least one token a
    head. Its budgets hold after a scale; inside one some layers have their new share and others still the old one,
    which can exceed B. With `strict` deep layers shrink one scale earlier where shallow ones grow, as far as needed.

    Attributes:
        alpha: share of contextual heads.
        tau: how sharply shares follow reliance; 0 for equal ones.
        attention_budget: tokens that a head attends to, as a fraction up to 1 of all tokens of an image or, above 1,
            their number; None for all that are held.
        observed: evenly spaced queries of the newest scale that stand for all.
        pool: neighbours whose maximum counts in contextual heads, odd; 1 for none.
        structural: what scores in structural heads: prior and norm of the value, one of both, or `attention`, as
            contextual heads have it.
        sinks: leading scales that never leave and are always read.
        strict: keep the budget after every layer; False for the published shares, whose peak is then measured.
    """

    alpha: float = 0.2
    tau: float = 1.0
    attention_budget: float | int | None = None
    observed: int = 32
    pool: int = 5
    structural: Structural = "prior_value"
    strict: bool = True

    families: ClassVar[tuple[Family, ...]] = ("next-scale",)
    revision: ClassVar[int] = 0  # not the one of `Scored`: shares always used the whole budget
    limits = set_limits(alpha=SHARE, tau=Limit(0, wants="must not be negative"), observed=Limit(1))

    @property
    def sparse_reads(self) -> bool:
        """Whether an attention budget is set."""
        return self.attention_budget is not None

    def needs(self) -> Observer | Path:
        """Return the calibration of classes, priors and reliance."""
        return HeadPatterns()

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuse settings out of range, and what `Scored` refuses."""
        super().check(spec, budget)
        count_read(self.attention_budget, spec)
        if self.pool < 1 or self.pool % 2 == 0:
            raise ValueError(f"method.pool={self.pool}: must be odd and positive")

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Sort the heads into classes and work out what each may hold after every scale."""
        super().prepare(spec, budget, artifact)
        tensors = require_artifact(artifact, "method=hackpp:")
        mass = tensors["mass"]
        self.is_contextual = find_contextual(tensors["sigma"], self.alpha)
        self._by_attention = self.is_contextual | (self.structural == "attention")
        # Known to the host, so that no layer asks a GPU.
        self._any_by_attention = [any(heads) for heads in self._by_attention.tolist()]
        self._all_by_attention = [all(heads) for heads in self._by_attention.tolist()]
        groups = group_heads(self.is_contextual)
        weights = weigh_groups(measure_reliance(mass, spec), groups, self.tau)
        min_tokens = max(1, spec.leading_tokens(self.sinks))
        self.capacities = share_budget(
            weights, groups, budget.tokens, spec, strict=self.strict, min_tokens=min_tokens
        )
        self.prior = (mass / torch.tensor(spec.lengths)).float()
        self._shares = [[tuple(heads) for heads in layers] for layers in self.capacities.tolist()]
        self._read = count_read(self.attention_budget, spec)

    def share(self, layer: int, segment: Segment) -> tuple[int, ...]:
        """Return what each head may hold after the scale."""
        return self._shares[segment.index][layer]

    def select_attended(self, view: View) -> Tensor | None:
        """Choose the best tokens of every row, as many as may be attended to."""
        if self._read is None or fits(view, self._read):
            return None
        return choose_best(self.rank(view), self._read)

    def score(self, view: View) -> Tensor:
        """Return what each slot is worth to its row, float32 [rows, slots]."""
        if not self._any_by_attention[view.layer]:
            return self._score_structural(view)
        received = view.mass(choose_window("uniform", view.segment, self.observed))
        smoothed = smooth(self.merge_branches(received), "max", self.pool, view.position >= 0)
        if self._all_by_attention[view.layer]:
            return smoothed
        rows = self._by_attention[view.layer].to(smoothed.device, non_blocking=True).repeat(view.sequences)
        return torch.where(rows[:, None], smoothed, self._score_structural(view))

    def _score_structural(self, view: View) -> Tensor:
        """Return the calibrated prior of each slot's scale times the norm of its value, float32 [rows, slots]."""
        norms = (
            view.value_norms() if self.structural != "prior" else torch.ones((), device=view.position.device)
        )
        if self.structural == "value":
            return norms
        prior = self.prior[view.layer, :, view.segment.index].to(view.position.device, non_blocking=True)
        return prior.repeat(view.sequences, 1).gather(1, view.segment_ids.clamp(min=0)) * norms


def count_read(attention_budget: float | int | None, spec: ModelSpec) -> int | None:
    """Return how many tokens a head may attend to, None for all (HACK++ counts them as B_a = eta_a x T_K).

    Args:
        attention_budget: a fraction up to 1 of all tokens of an image, the last scale's too, or, above 1, their number.
        spec: the model's shapes.

    Raises:
        ValueError: naming the setting.
    """
    if attention_budget is None:
        return None
    tokens = spec.segments[-1].end
    try:
        number = Fraction(str(attention_budget))
    except (ValueError, ZeroDivisionError):
        number = Fraction(0)
    if not 0 < number <= tokens or (number > 1 and number.denominator != 1):
        raise ValueError(
            f"method.attention_budget={attention_budget}: give a fraction in (0, 1] or a whole number of tokens per "
            f"head, of which {spec.name} has {tokens}"
        )
    return max(1, int(number * tokens)) if number <= 1 else int(number)
