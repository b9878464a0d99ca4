"""Base classes of methods that score tokens: every row keeps its slots of highest score."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec, Segment
from kvbench.methods.shared.base import SHARE, Artifact, Limit, Method
from kvbench.methods.shared.capabilities import Stateful
from kvbench.methods.shared.capacities import Ints
from kvbench.methods.shared.grouped import choose_among_heads
from kvbench.methods.shared.select import (
    USUAL_WINDOW,
    BranchMode,
    Pool,
    Window,
    average_attention,
    check_branch_mode,
    check_capacity,
    check_window,
    choose_best,
    choose_window,
    find_sinks,
    find_slots,
    find_valid_queries,
    fit_window,
    fits,
    merge_branches,
    share_evenly,
    smooth_outside,
    spread_capacity,
)
from kvbench.methods.shared.view import View


@dataclass(kw_only=True)
class Scored(Stateful, Method):
    """Keep the slots of highest score, equally many in every row; a subclass writes `score`.

    Scores may be asked for at every n-th segment only (`refresh`): at the prompt or first scale, at segment 1, and n
    segments after the last time. In between slots keep the score that they had; slots that came since have none and
    rank above all others, the newest first. With `ema` a score is a moving average over the times it was asked for,
    m = ema * m + (1 - ema) * s (arXiv:2609.03515 has 0.8), which begins with a slot's first score.

    Attributes:
        branch_mode: who decides (`select.BranchMode`).
        sinks: leading segments that never leave.
        refresh: n, how many segments lie between two times that scores are asked for; 1 asks at every segment.
        ema: weight of earlier scores, 0 for none.
        accumulates: `score` reads a number that the method itself keeps in `View.state`.
    """

    branch_mode: BranchMode = "per_row"
    sinks: int = 0
    refresh: int = 1
    ema: float = 0.0

    accumulates: ClassVar[bool] = False
    revision: ClassVar[int] = 1  # what floor(B / T) left was unused

    @property
    def stateful(self) -> bool:
        """Whether a number is kept per slot: the method's own, or the score it had."""
        return self.accumulates or self.refresh > 1 or self.ema > 0

    @property
    def even(self) -> bool:
        """Whether every head fills an even share of B, which `assign_capacities` can replace."""
        return type(self).share is Scored.share and type(self).capacity is Scored.capacity

    @property
    def uses_value_norms(self) -> bool:
        """Whether scores contain the norm of values, which other methods would then count twice."""
        return False

    @property
    def guaranteed_share(self) -> float:
        """Share of an even capacity that a head is sure to fill with its best slots, if heads compete; else 0."""
        return 0.0

    def observe(self, view: View) -> None:
        """Update what the method keeps of slots, after every segment at which scores are asked for; nothing by default.

        Unlike `score` it is also called while everything fits.
        """

    def score(self, view: View) -> Tensor:
        """Return what each slot is worth, float32 [rows, slots]; infinity keeps it, the earlier one wins a tie.

        It is not asked while everything fits. What becomes of the sinks and of `rows` is no concern of it.
        """
        raise NotImplementedError

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuse sinks and deciders that the model cannot have, and a budget too small for sinks or a token a head."""
        super().check(spec, budget)
        Limit(1).check("refresh", self.refresh)
        Limit(0, 1).check("ema", self.ema)
        if self.accumulates and self.ema:
            raise ValueError(
                f"method.ema={self.ema}: {type(self).__name__} accumulates its scores; set method.ema=0"
            )
        check_branch_mode(self.branch_mode, spec)
        check_capacity(spec, budget, self.sinks, self.count_reserved(spec))

    def count_reserved(self, spec: ModelSpec) -> int:
        """Return the tokens that every head must be able to hold beside the sinks."""
        return 0

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Share the budget among all heads."""
        super().prepare(spec, budget, artifact)
        self._capacities = share_evenly(budget.tokens, spec)
        self._assigned: list[list[tuple[int, ...]]] = []

    def assign_capacities(self, capacities: Ints) -> None:
        """Give heads capacities in place of an even share, int64 [K - 1, L, H]; `prepare` takes them back."""
        self._assigned = [[tuple(heads) for heads in layers] for layers in capacities.tolist()]

    def share(self, layer: int, segment: Segment) -> int | tuple[int, ...]:
        """Return what a layer's heads may hold once a segment is over, as `capacity` does: an even share of B."""
        return self._assigned[segment.index][layer] if self._assigned else self._capacities[layer]

    def capacity(self, layer: int, segment: Segment) -> int | tuple[int, ...] | None:
        """Return the share of B, which every head fills."""
        return self.share(layer, segment)

    def min_capacity(self, view: View) -> int:
        """Return the capacity of the layer's head that has least, before padding takes of it."""
        capacity = self.share(view.layer, view.segment)
        return capacity if isinstance(capacity, int) else min(capacity)

    def keep(self, view: View) -> Tensor | None:
        """Keep the sinks and the best of the rest, as many as fit."""
        if self._is_fresh(view):
            self.observe(view)
        if not fits(view, self.min_capacity(view)):
            return self.choose(view, self.rank(view))
        if self.stateful and not self.accumulates and self._is_fresh(view):
            self.rate(view)  # what it notes is asked for later
        return None

    def choose(self, view: View, ranked: Tensor) -> Tensor:
        """Choose what stays, bool [rows, slots]: the best of every row, as many as its head may hold.

        Args:
            view: the layer.
            ranked: what `rank` returned, [rows, slots].
        """
        return choose_best(ranked, spread_capacity(self.share(view.layer, view.segment), view))

    def rank(self, view: View) -> Tensor:
        """Return merged scores, float32 [rows, slots]: infinity for sinks, -inf where a row has no such slot."""
        scores = self.rate(view).masked_fill(find_sinks(view, self.sinks), torch.inf)
        return scores.masked_fill(view.position < 0, -torch.inf)

    def rate(self, view: View) -> Tensor:
        """Return scores [rows, slots] on which the branches agree: the present ones, or as `refresh` and `ema` say."""
        if self.accumulates:
            scores = self.merge_branches(self.score(view))
            return scores if self._is_fresh(view) else self._rank_new_first(view, scores)
        if self._is_fresh(view):
            scores = self.merge_branches(self.score(view))
            if not self.stateful:
                return scores
            last = max(0, view.segment.index - self.refresh) if view.segment.index else -1
            before = view.state.isfinite() & (view.segment_ids <= last)
            averaged = self.ema * view.state + (1 - self.ema) * scores
            view.state.copy_(torch.where(before & scores.isfinite(), averaged, scores))
            return scores if not self.ema else view.state.clone()
        return self._rank_new_first(view, view.state)

    def _is_fresh(self, view: View) -> bool:
        """Return whether scores are asked for after this segment."""
        return self.last_asked(view.segment.index) == view.segment.index

    def last_asked(self, index: int) -> int:
        """Return the last segment after which scores were asked for, at most `index`."""
        return max(0, index - (index - 1) % self.refresh)

    def _rank_new_first(self, view: View, scores: Tensor) -> Tensor:
        """Return scores with those of slots that have none above all others, later ones higher: float64 [rows, slots].

        Slots that were the window when scores were asked for have none either.
        """
        known = scores.isfinite() & (view.segment_ids <= self.last_asked(view.segment.index))
        highest = scores.double().masked_fill(~known, -torch.inf).amax(1, keepdim=True)
        highest = highest.masked_fill(highest == -torch.inf, 0)
        return torch.where(known, scores.double(), highest + (highest.abs() + 1) * (1 + view.position))

    def valid_slots(self, view: View) -> Tensor | None:
        """Return which slots every row has, bool [rows, slots]; None where rows are equally long and have all."""
        if view.padding is None and isinstance(self.share(view.layer, view.segment), int):
            return None
        return view.position >= 0

    def merge_branches(self, scores: Tensor) -> Tensor:
        """Return scores [rows, slots] on which the branches of a prompt agree, as `rows` says."""
        return merge_branches(scores, self.branch_mode, self.spec.branches)


@dataclass(kw_only=True)
class AdaptiveHeads(Scored):
    """The heads of each layer and sequence compete for the layer's capacity (Ada-KV, arXiv:2407.11550).

    A layer's best slots stay, whichever head they are of. Every head is sure of the best slots of a share of its
    capacity.

    Attributes:
        safeguard: share of an even capacity that every head fills with its own best slots, alpha of the paper.
    """

    safeguard: float = 0.2

    @property
    def competes(self) -> bool:
        """Whether heads do; otherwise each has as many slots as the others."""
        return True

    @property
    def even(self) -> bool:
        """Whether heads do not compete, and nothing else gives them unequal shares."""
        return not self.competes and type(self).share is Scored.share

    @property
    def heads_independent(self) -> bool:
        """Whether heads are independent."""
        return super().heads_independent and not self.competes

    @property
    def guaranteed_share(self) -> float:
        """The safeguard, if heads compete."""
        return self.safeguard if self.competes else 0.0

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuse a safeguard out of range, and what `Scored` refuses."""
        super().check(spec, budget)
        SHARE.check("safeguard", self.safeguard)

    def capacity(self, layer: int, segment: Segment) -> int | tuple[int, ...] | None:
        """Return None if heads compete: the data decides how long a row is."""
        return None if self.competes else super().capacity(layer, segment)

    def valid_slots(self, view: View) -> Tensor | None:
        """Return which slots every row has, bool [rows, slots]; None where all rows have all."""
        return view.position >= 0 if self.competes else super().valid_slots(view)

    def rate(self, view: View) -> Tensor:
        """Return scores without an infinity: sinks come before windows, for which heads compete."""
        return (
            super().rate(view).clamp(max=torch.finfo(torch.float32).max)
            if self.competes
            else super().rate(view)
        )

    def choose(self, view: View, ranked: Tensor) -> Tensor:
        """Choose the sinks, and the best slots of the layer."""
        if not self.competes:
            return super().choose(view, ranked)
        capacity = spread_capacity(self.share(view.layer, view.segment), view)
        return choose_among_heads(ranked, capacity, view.heads, self.safeguard)


@dataclass(kw_only=True)
class ObservationWindow(Scored):
    """Keep a window of the newest segment and what its queries find best; a subclass writes `score_outside`.

    A capacity of less than twice the window shrinks the window.

    Attributes:
        window: tokens of the window, a square number for `grid`.
        queries: which tokens (`select.choose_window`).
        kernel: slots that smoothing takes together, odd; 1 for none.
    """

    window: int = USUAL_WINDOW
    queries: Window = "grid"
    kernel: int = 5

    def score_outside(self, view: View, chosen: Tensor, inside: Tensor) -> Tensor:
        """Return what each slot outside the window is worth, float32 [rows, slots]; inside, numbers do not matter.

        Args:
            view: the layer.
            chosen: the window's tokens in the current segment, int64 [n].
            inside: the window's slots, bool [rows, slots].
        """
        raise NotImplementedError

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuse windows and kernels that cannot be, and what `Scored` refuses."""
        check_window(self.window, self.kernel, self.queries, max(spec.lengths))
        super().check(spec, budget)

    def fit(self, view: View) -> int:
        """Return the tokens of the window in a layer: no more than leave half of its capacity to others."""
        return fit_window(self.window, self.min_capacity(view))

    def score(self, view: View) -> Tensor:
        """Return infinity inside the window and `score_outside` elsewhere, float32 [rows, slots]."""
        chosen = choose_window(self.queries, view.segment, self.fit(view))
        inside = find_slots(view, chosen)
        return self.score_outside(view, chosen, inside).masked_fill(inside, torch.inf)


@dataclass(kw_only=True)
class WindowAttention(ObservationWindow):
    """Score what lies outside a window by the attention from its queries, smoothed along the cache (arXiv:2404.14469).

    Attributes:
        softmax: over all slots (SnapKV, kvpress) or those outside the window (R-KV).
        group: query heads that share a KV head: mean of probabilities (kvpress) or maximum of logits (R-KV).
        pool: kind of smoothing.
    """

    softmax: Literal["all", "prefix"] = "all"
    group: Literal["mean", "max"] = "mean"
    pool: Pool = "max"

    revision: ClassVar[int] = 2  # slots that a row has not were its slots' neighbours

    def score_outside(self, view: View, chosen: Tensor, inside: Tensor) -> Tensor:
        """Return the smoothed attention from the window's queries, float32 [rows, slots]."""
        attention = average_attention(
            view.scores(chosen),
            inside,
            softmax=self.softmax,
            group=self.group,
            asking=find_valid_queries(view, chosen),
        )
        return smooth_outside(attention, inside, self.pool, self.kernel, exists=self.valid_slots(view))
