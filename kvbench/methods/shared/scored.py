"""Base classes of methods that score tokens: each row keeps its slots of highest score."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec, Segment
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.calibration import Artifact
from kvbench.methods.shared.capacities import Ints, share_evenly
from kvbench.methods.shared.grouped import choose_among_heads
from kvbench.methods.shared.hook_results import require_tensor
from kvbench.methods.shared.limits import SHARE, Limit
from kvbench.methods.shared.select import (
    DEFAULT_WINDOW,
    BranchMode,
    Pool,
    Window,
    average_attention,
    check_branch_mode,
    check_capacity,
    check_window,
    choose_best,
    choose_window,
    find_leading,
    find_slots,
    find_valid_queries,
    fit_window,
    fits,
    merge_branches,
    smooth_outside,
    spread_capacity,
)
from kvbench.methods.shared.uses import Uses
from kvbench.methods.shared.view import View

COMPETING = "its heads compete, so that the lengths of rows depend on data"
LARGEST = torch.finfo(torch.float32).max
"""Smallest score that protects a slot; competing heads clamp infinity to it."""


@dataclass(kw_only=True)
class Scored(Method):
    """Keep the slots of highest score, the same number in each row; a subclass writes `score`.

    With `refresh`, `score` is called only at segments 0, 1, 1 + n, 1 + 2 n and so on. Between calls slots keep their
    score; later slots have none and rank above all others, the newest first. With `ema` a score is a moving average
    over the calls, m = ema * m + (1 - ema) * s (arXiv:2609.03515 has 0.8), which begins with a slot's first score.

    Attributes:
        branch_mode: choice of the branch whose scores decide (`select.BranchMode`).
        sinks: leading segments that are never evicted.
        leading: first tokens of a sequence, after its padding, that are never evicted.
        refresh: n, segments between two calls of `score`; 1 calls it at every segment.
        ema: weight of earlier scores, 0 for none.
        asked: call `score` after `every` segment, or after the `prompt` only; a setting of some subclasses.
        own_state: values per slot that the method itself keeps in `View.state`.
        same_at_any_capacity: whether scores do not depend on the capacity of a row.
    """

    branch_mode: BranchMode = "per_row"
    sinks: int = 0
    leading: int = 0
    refresh: int = 1
    ema: float = 0.0

    asked = "every"
    own_state: ClassVar[int] = 0
    same_at_any_capacity: ClassVar[bool] = False
    revision: ClassVar[int] = 1  # before, the remainder of floor(B / T) was unused

    @property
    def uses(self) -> Uses:
        """The method's own values per slot, or a slot's earlier score."""
        return Uses(state=self.own_state or int(self.keeps_scores))

    @property
    def keeps_scores(self) -> bool:
        """Whether the state of a slot is its earlier score."""
        return not self.own_state and (self.refresh > 1 or self.ema > 0 or self.asked == "prompt")

    @property
    def uniform_capacity(self) -> bool:
        """Whether every head fills an even share of B, which `assign_capacities` can replace."""
        return type(self).share is Scored.share and type(self).capacity is Scored.capacity

    @property
    def uses_value_norms(self) -> bool:
        """Whether scores contain the norm of values, which other methods would then count twice."""
        return False

    @property
    def guaranteed_share(self) -> float:
        """Share of an even capacity that a head always fills with its best slots if heads compete; otherwise 0."""
        return 0.0

    def observe(self, view: View) -> None:
        """Update the state of slots at each segment with new scores, also while everything fits."""

    def score(self, view: View) -> Tensor:
        """Return a score of each slot, float32 [rows, slots]; infinity keeps a slot, and the earlier slot wins a tie.

        It is not called while everything fits. The caller applies the sinks and `branch_mode`. A run warns if a row has
        more slots of score infinity than it may hold.
        """
        raise NotImplementedError

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuse sinks or a branch mode that do not fit the model, and a budget below the sinks or a token a head."""
        super().check(spec, budget)
        if type(self).score is Scored.score and type(self).ranked_if_full is Scored.ranked_if_full:
            raise ValueError(f"method={self.title}: has no score; implement `score` or `keep`")
        Limit(1).check("refresh", self.refresh)
        Limit(0, 1).check("ema", self.ema)
        if self.own_state and self.ema:
            raise ValueError(f"method.ema={self.ema}: {self.title} accumulates its scores; set method.ema=0")
        check_branch_mode(self.branch_mode, spec)
        check_capacity(spec, budget, self.sinks, self.count_reserved(spec), leading=self.leading)

    def count_reserved(self, spec: ModelSpec) -> int:
        """Return the tokens that each head must be able to hold in addition to the sinks."""
        return 0

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Share the budget evenly among all heads."""
        super().prepare(spec, budget, artifact)
        self._capacities = share_evenly(budget.tokens, spec)
        self._assigned: list[list[int | tuple[int, ...]]] = []

    def assign_capacities(self, capacities: Ints | Tensor) -> None:
        """Set capacities of heads instead of an even share, int64 [K - 1, L, H]; `prepare` resets them."""
        self._assigned = [[tuple(heads) for heads in layers] for layers in capacities.tolist()]

    def share(self, layer: int, segment: Segment) -> int | tuple[int, ...]:
        """Return the capacity of a layer's heads after a segment, an even share of B (int or tuple as `capacity`)."""
        return self._assigned[segment.index][layer] if self._assigned else self._capacities[layer]

    def capacity(self, layer: int, segment: Segment) -> int | tuple[int, ...] | None:
        """Return the share of B, which each head fills."""
        return self.share(layer, segment)

    def min_capacity(self, view: View) -> int:
        """Return the smallest capacity of the layer's heads, without the charge for padding."""
        capacity = self.share(view.layer, view.segment)
        return capacity if isinstance(capacity, int) else min(capacity)

    def row_capacities(self, view: View) -> int | Tensor:
        """Return the capacity of each row, int64 [rows], by the plan for its prompt; or an int for all."""
        shares = [plan.share(view.layer, view.segment) for plan in self.list_plans(view)]
        if len(set(shares)) == 1:
            return spread_capacity(shares[0], view)
        rows = [share if isinstance(share, tuple) else (share,) * view.heads for share in shares]
        return torch.tensor(rows).flatten().to(view.position.device, non_blocking=True)

    def list_min_capacities(self, view: View) -> list[int]:
        """Return `min_capacity` by the plan for each sequence's prompt; one entry if all prompts are equally long."""
        return [plan.min_capacity(view) for plan in self.list_plans(view)]

    def keep(self, view: View) -> Tensor | None:
        """Keep sinks and the best other slots that fit: bool [rows, slots]; None while everything fits."""
        ranked = self.ranked_if_full(view)
        if ranked is None:
            return None
        kept = self.select_slots(view, ranked)
        view.count_unprotected((ranked >= LARGEST) > kept)
        return kept

    def ranked_if_full(self, view: View) -> Tensor | None:
        """Update the state of slots, and return their ranking [rows, slots]; None while everything fits."""
        if self._is_fresh(view):
            self.observe(view)
        if not fits(view, min(self.list_min_capacities(view))):
            return self.ranked_scores(view)
        if self.keeps_scores and self._is_fresh(view):
            self.smoothed_scores(view)  # stores the scores for later segments
        return None

    def select_slots(self, view: View, ranked: Tensor) -> Tensor:
        """Select each row's best slots up to its capacity, bool [rows, slots], by `ranked_scores` [rows, slots]."""
        return choose_best(ranked, self.row_capacities(view))

    def ranked_scores(self, view: View) -> Tensor:
        """Return merged scores, float32 [rows, slots]: infinity for sinks, -inf where a row has no such slot."""
        sinks = view.position < self.spec.leading_tokens(self.sinks)
        if self.leading:
            sinks = sinks | find_leading(view, self.leading)
        scores = self.smoothed_scores(view).masked_fill(sinks, torch.inf)
        return scores if view.exists is None else scores.masked_fill(~view.exists, -torch.inf)

    def smoothed_scores(self, view: View) -> Tensor:
        """Return scores, floating-point [rows, slots], after `branch_mode`, `refresh` and `ema`."""
        if not self.own_state and not self._is_fresh(view):
            return self._rank_new_first(view, view.state)
        scores = self.score(view)
        require_tensor("score", scores, view.position.shape, "[rows, slots]")  # other shapes may broadcast
        scores = merge_branches(scores, self.branch_mode, self.spec.branches)
        if not self.keeps_scores:
            return scores if self._is_fresh(view) else self._rank_new_first(view, scores)
        last = max(0, view.segment.index - self.refresh) if view.segment.index else -1
        before = view.state.isfinite() & (view.segment_ids <= last)
        averaged = self.ema * view.state + (1 - self.ema) * scores
        view.state.copy_(torch.where(before & scores.isfinite(), averaged, scores))
        return scores if not self.ema else view.state.clone()

    def _is_fresh(self, view: View) -> bool:
        """Return whether `score` is called after this segment."""
        return self._last_asked(view.segment.index) == view.segment.index

    def _last_asked(self, index: int) -> int:
        """Return the last segment up to `index` after which `score` was called."""
        return 0 if self.asked == "prompt" else max(0, index - (index - 1) % self.refresh)

    def _rank_new_first(self, view: View, scores: Tensor) -> Tensor:
        """Rank slots without a score above all others, later slots higher: float64 [rows, slots].

        Slots of the window at the last call of `score` have no score either.
        """
        known = scores.isfinite() & (view.segment_ids <= self._last_asked(view.segment.index))
        highest = scores.double().masked_fill(~known, -torch.inf).amax(1, keepdim=True)
        highest = highest.masked_fill(highest == -torch.inf, 0)
        return torch.where(known, scores.double(), highest + (highest.abs() + 1) * (1 + view.position))


@dataclass(kw_only=True)
class AdaptiveHeads(Scored):
    """The heads of each layer and sequence compete for the layer's capacity (Ada-KV, arXiv:2407.11550).

    A layer keeps its best slots, in any of its heads. Each head keeps at least its own best slots for a share of its
    capacity.

    Attributes:
        safeguard: share of an even capacity that each head fills with its own best slots, alpha of the paper; a share
            above 0 is at least one slot.
    """

    safeguard: float = 0.2

    @property
    def competes(self) -> bool:
        """Whether heads compete; otherwise all heads have the same number of slots."""
        return True

    @property
    def graph_obstacle(self) -> str | None:
        """The lengths of rows depend on data if heads compete."""
        return COMPETING if self.competes else super().graph_obstacle

    @property
    def uniform_capacity(self) -> bool:
        """Whether heads neither compete nor have unequal shares for another reason."""
        return not self.competes and type(self).share is Scored.share

    @property
    def heads_independent(self) -> bool:
        """Whether tensor-parallel processes can each own some heads, because these do not compete."""
        return super().heads_independent and not self.competes

    @property
    def guaranteed_share(self) -> float:
        """Share of an even capacity that each head keeps; 0 if heads do not compete."""
        return self.safeguard if self.competes else 0.0

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuse a safeguard out of range, and what `Scored` refuses."""
        super().check(spec, budget)
        SHARE.check("safeguard", self.safeguard)

    def capacity(self, layer: int, segment: Segment) -> int | tuple[int, ...] | None:
        """Return None if heads compete: the lengths of rows depend on data."""
        return None if self.competes else super().capacity(layer, segment)

    def smoothed_scores(self, view: View) -> Tensor:
        """Return finite scores if heads compete for windows, because sinks rank above these."""
        scores = super().smoothed_scores(view)
        return scores.clamp(max=LARGEST) if self.competes else scores

    def select_slots(self, view: View, ranked: Tensor) -> Tensor:
        """Select sinks and the layer's best slots, bool [rows, slots]."""
        if not self.competes:
            return super().select_slots(view, ranked)
        capacity = self.row_capacities(view)
        return choose_among_heads(ranked, capacity, view.heads, self.safeguard)


@dataclass(kw_only=True)
class ObservationWindow(Scored):
    """Keep a window of the newest segment and the slots that its queries score best; a subclass writes `score_outside`.

    A capacity of less than twice the window shrinks the window.

    Attributes:
        window: tokens of the window, a square number for `grid`.
        queries: choice of the tokens (`select.choose_window`).
        kernel: slots of the smoothing kernel, odd; 1 for none.
    """

    window: int = DEFAULT_WINDOW
    queries: Window = "grid"
    kernel: int = 5

    def score_outside(self, view: View, chosen: Tensor, inside: Tensor) -> Tensor:
        """Return a score of each slot outside the window, float32 [rows, slots]; scores inside are ignored.

        The window has the tokens `chosen` of the current segment, int64 [n], in the slots `inside`, bool [rows, slots].
        """
        raise NotImplementedError

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuse invalid windows and kernels, and what `Scored` refuses."""
        check_window(self.window, self.kernel, self.queries, max(spec.lengths))
        super().check(spec, budget)

    def fit(self, view: View) -> int:
        """Return the tokens of the window in a layer, at most half of its capacity."""
        return fit_window(self.window, self.min_capacity(view))

    def score(self, view: View) -> Tensor:
        """Return infinity inside the window and `score_outside` elsewhere, float32 [rows, slots]."""
        chosen = choose_window(self.queries, view.segment, self.fit(view))
        inside = find_slots(view, chosen)
        scores = self.score_outside(view, chosen, inside)
        require_tensor("score_outside", scores, inside.shape, "[rows, slots]")
        return scores.masked_fill(inside, torch.inf)


@dataclass(kw_only=True)
class WindowAttention(ObservationWindow):
    """Score slots outside a window by the attention from its queries, smoothed along the cache (arXiv:2404.14469).

    Attributes:
        softmax: over all slots (SnapKV, kvpress) or the slots outside the window (R-KV).
        group: query heads that share a KV head: mean of probabilities (kvpress) or maximum of logits (R-KV).
        pool: kind of smoothing.
    """

    softmax: Literal["all", "prefix"] = "all"
    group: Literal["mean", "max"] = "mean"
    pool: Pool = "max"

    recordable: ClassVar[bool] = True
    revision: ClassVar[int] = 2  # before, smoothing included missing slots

    def score_outside(self, view: View, chosen: Tensor, inside: Tensor) -> Tensor:
        """Return the smoothed attention from the window's queries, float32 [rows, slots]."""
        attention = average_attention(
            view.scores(chosen),
            inside,
            softmax=self.softmax,
            group=self.group,
            asking=find_valid_queries(view, chosen),
        )
        return smooth_outside(attention, inside, self.pool, self.kernel, exists=view.exists)
