"""HACK++: budgets by the reliance of later scales, for attention and for the cache (arXiv:2606.08302)."""

from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import Family, ModelSpec
from kvbench.methods.hack.budgets import group_heads, measure_reliance, share_budget, weigh_groups
from kvbench.methods.hack.classes import HeadPatterns, find_contextual
from kvbench.methods.shared.calibration import Artifact, Observer, require_artifact
from kvbench.methods.shared.limits import SHARE, Limit, set_limits
from kvbench.methods.shared.scored import Scored
from kvbench.methods.shared.select import choose_best, choose_window, fits, merge_branches, smooth
from kvbench.methods.shared.uses import Uses
from kvbench.methods.shared.view import View

Structural = Literal["prior_value", "prior", "value", "attention"]


@dataclass
class HACKPlusPlus(Scored):
    """Score contextual heads by attention and structural heads by a prior, with budgets by the reliance on them.

    Contextual heads (the alpha x T of lowest column variance) score a token by the attention of a few spaced queries
    of the newest scale, with a maximum over its neighbours. Structural heads score it by the calibrated attention per
    token to its scale, times the norm of its value. After every scale each head keeps its best tokens. For every scale
    B is shared among groups of heads of one class and layer in proportion to (reliance)^tau, where reliance is the
    attention per past token of all later scales. The paper protects no tokens (`sinks`).

    `attention_budget` is the paper's first phase: while a scale is generated, each head attends only to its best tokens
    by the same scores, including the scale's own tokens, and the cache evicts nothing. It saves attention's work but
    not memory, and costs quality. Without it the method is the paper's cache compression alone (its Table X).

    Differs from the paper in: its budgets are fractions of all tokens, including the last scale, ours of the cached
    tokens (docs/tables.md). The paper does not define the calibrated rows, the width of maxima, and shares that a head
    cannot fill or that are not whole: here conditional rows, 5, and water-filling with at least one token per head. Its
    budgets hold after a scale; within a scale, some layers have their new share and other layers their old share, which
    can exceed B. With `strict`, deep layers shrink one scale earlier where shallow layers grow, as far as needed.

    Attributes:
        alpha: share of contextual heads.
        tau: exponent of reliance; 0 for equal shares.
        attention_budget: tokens that a head attends to, up to 1 as a fraction of all tokens of an image, above 1 as a
            number; None for all cached tokens.
        observed: number of evenly spaced queries of the newest scale that represent all.
        pool: width of the maximum over neighbours in contextual heads, odd; 1 for none.
        structural: score of structural heads: `prior`, norm of the `value`, their product `prior_value`, or `attention`
            as in contextual heads.
        sinks: number of leading scales that are never evicted and always read.
        strict: keep the budget after every layer; False for the published shares, whose peak may exceed it.
    """

    alpha: float = 0.2
    tau: float = 1.0
    attention_budget: float | int | None = None
    observed: int = 32
    pool: int = 5
    structural: Structural = "prior_value"
    strict: bool = True

    recordable: ClassVar[bool] = True
    uniform_capacity = False  # classes and layers have budgets of their own
    families: ClassVar[tuple[Family, ...]] = ("next-scale",)
    revision: ClassVar[int] = 0  # unlike `Scored`, always used the whole budget
    limits = set_limits(alpha=SHARE, tau=Limit(0, wants="must not be negative"), observed=Limit(1))

    @property
    def uses(self) -> Uses:
        """Requirements of `Scored`, and sparse reads with an attention budget."""
        return replace(super().uses, sparse_reads=self.attention_budget is not None)

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
        """Classify the heads and compute their capacity after every scale."""
        super().prepare(spec, budget, artifact)
        tensors = require_artifact(artifact, "method=hackpp:")
        mass = tensors["mass"]
        self.is_contextual = find_contextual(tensors["sigma"], self.alpha)
        self._by_attention = self.is_contextual | (self.structural == "attention")
        # On the host, to avoid a synchronisation with the GPU in every layer.
        self._any_by_attention = [any(heads) for heads in self._by_attention.tolist()]
        self._all_by_attention = [all(heads) for heads in self._by_attention.tolist()]
        groups = group_heads(self.is_contextual)
        weights = weigh_groups(measure_reliance(mass, spec), groups, self.tau)
        min_tokens = max(1, spec.leading_tokens(self.sinks))
        self.capacities = share_budget(
            weights, groups, budget.tokens, spec, strict=self.strict, min_tokens=min_tokens
        )
        self.prior = (mass / torch.tensor(spec.lengths)).float()
        self.assign_capacities(self.capacities)
        self._read = count_read(self.attention_budget, spec)

    def select_attended(self, view: View) -> Tensor | None:
        """Choose the best tokens up to the attention budget: bool [rows, slots]; None for all tokens."""
        if self._read is None or fits(view, self._read):
            return None
        return choose_best(self.ranked_scores(view), self._read)

    def score(self, view: View) -> Tensor:
        """Return the score of each slot, float32 [rows, slots]."""
        if not self._any_by_attention[view.layer]:
            return self._score_structural(view)
        received = view.mass(choose_window("uniform", view.segment, self.observed))
        merged = merge_branches(received, self.branch_mode, self.spec.branches)
        smoothed = smooth(merged, "max", self.pool, view.exists)
        if self._all_by_attention[view.layer]:
            return smoothed
        rows = self._by_attention[view.layer].to(smoothed.device, non_blocking=True).repeat(view.sequences)
        return torch.where(rows[:, None], smoothed, self._score_structural(view))

    def _score_structural(self, view: View) -> Tensor:
        """Return the calibrated prior of each slot's scale times the norm of its value, float32 [rows, slots]."""
        if self.structural == "value":
            return view.value_norms()
        prior = self.prior[view.layer, :, view.segment.index].to(view.position.device, non_blocking=True)
        scores = prior.repeat(view.sequences, 1).gather(1, view.segment_ids.clamp(min=0))
        return scores if self.structural == "prior" else scores * view.value_norms()


def count_read(attention_budget: float | int | None, spec: ModelSpec) -> int | None:
    """Return the number of tokens that a head may attend to, None for all (HACK++: B_a = eta_a x T_K).

    All tokens, of which `attention_budget` (`HACKPlusPlus`) may be a fraction, include the last scale.

    Raises:
        ValueError: not a fraction in (0, 1] or a whole number up to all tokens.
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
            f"head, at most {tokens} for {spec.name}"
        )
    return max(1, int(number * tokens)) if number <= 1 else int(number)
