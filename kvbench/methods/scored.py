"""Base classes of methods that score tokens: every row keeps its slots of highest score."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec, Segment
from kvbench.methods.base import Artifact, Method
from kvbench.methods.select import (
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
    find_asking,
    find_sinks,
    find_slots,
    fit_window,
    fits,
    merge_branches,
    share_evenly,
    smooth_outside,
    spread_capacity,
)
from kvbench.methods.view import View


@dataclass(kw_only=True)
class Scored(Method):
    """Keep the slots of highest score, equally many in every row; a subclass writes `score`.

    Attributes:
        branch_mode: who decides (`select.BranchMode`).
        sinks: leading segments that never leave.
    """

    branch_mode: BranchMode = "per_row"
    sinks: int = 0

    revision: ClassVar[int] = 1  # what floor(B / T) left was unused

    def score(self, view: View) -> Tensor:
        """Return what each slot is worth, float32 [rows, slots]; infinity keeps it, the earlier one wins a tie.

        It is not asked while everything fits. What becomes of the sinks and of `rows` is no concern of it.
        """
        raise NotImplementedError

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuse sinks and deciders that the model cannot have, and a budget too small for sinks or a token a head."""
        super().check(spec, budget)
        check_branch_mode(self.branch_mode, spec)
        check_capacity(spec, budget, self.sinks)

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Share the budget among all heads."""
        super().prepare(spec, budget, artifact)
        self._capacities = share_evenly(budget.tokens, spec)

    def share(self, layer: int, segment: Segment) -> int | tuple[int, ...]:
        """Return what a layer's heads may hold once a segment is over, as `capacity` does: an even share of B."""
        return self._capacities[layer]

    def capacity(self, layer: int, segment: Segment) -> int | tuple[int, ...] | None:
        """Return the share of B, which every head fills."""
        return self.share(layer, segment)

    def min_capacity(self, view: View) -> int:
        """Return the capacity of the layer's head that has least, before padding takes of it."""
        capacity = self.share(view.layer, view.segment)
        return capacity if isinstance(capacity, int) else min(capacity)

    def keep(self, view: View) -> Tensor | None:
        """Keep the sinks and the best of the rest, as many as fit."""
        if fits(view, self.min_capacity(view)):
            return None
        return choose_best(self.rank(view), spread_capacity(self.share(view.layer, view.segment), view))

    def rank(self, view: View) -> Tensor:
        """Return merged scores, float32 [rows, slots]: infinity for sinks, -inf where a row has no such slot."""
        scores = self.merge_branches(self.score(view)).masked_fill(find_sinks(view, self.sinks), torch.inf)
        return scores.masked_fill(view.position < 0, -torch.inf)

    def valid_slots(self, view: View) -> Tensor | None:
        """Return which slots every row has, bool [rows, slots]; None where rows are equally long and have all."""
        if view.padding is None and isinstance(self.share(view.layer, view.segment), int):
            return None
        return view.position >= 0

    def merge_branches(self, scores: Tensor) -> Tensor:
        """Return scores [rows, slots] on which the branches of a prompt agree, as `rows` says."""
        return merge_branches(scores, self.branch_mode, self.spec.branches)


@dataclass(kw_only=True)
class Windowed(Scored):
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
class Attentive(Windowed):
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
            asking=find_asking(view, chosen),
        )
        return smooth_outside(attention, inside, self.pool, self.kernel, exists=self.valid_slots(view))
