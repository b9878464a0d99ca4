"""HeadKV: heads that look nearby keep the newest lines alone, the others history as well (arXiv:2605.20600)."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import Family, ModelSpec
from kvbench.methods.shared.base import SHARE, Artifact, Limit, Method, set_limits
from kvbench.methods.shared.select import (
    BranchMode,
    LineAttention,
    cap_recent,
    check_branch_mode,
    check_capacity,
    choose_best,
    find_sinks,
    merge_branches,
    score_line,
    share_by_head,
)
from kvbench.methods.shared.view import View


@dataclass(kw_only=True)
class HeadKV(Method):
    """Sort heads into local and global ones while an image is made; local heads keep no history.

    Once the cache is long enough, every KV head of every layer is sorted by its attention from the newest query: it is
    local if that attends, walking back from the newest token, to `threshold` of everything within fewer tokens than
    the local window (section 4, step 2). From then on local heads keep the condition and the recent lines (Eq. 3),
    global heads as much history beside them as they can hold (Eq. 4). History loses tokens in two strata: of the
    older part (a share `ratio` of it, Eq. 5) and of the newer part, those that the line just finished attends to least
    (Eq. 6), half of them from each.

    With `match_mean` all heads of a sequence together use B: what local heads leave, global heads have. While layers
    are still being sorted, those to come count as global, so that the budget holds after every layer. Where history is
    as long as can be in all global heads, local heads see further back.

    Differs from the paper in: heads are sorted at the end of a line, the first at which the cache is longer than
    `group_at` or than B / T, which it may never exceed; the paper caches more until then. The condition counts in B, as
    all that is cached does: B / T = 97 tokens are the paper's 96 (1/6 of LlamaGen's 576) and the class. A buffer of
    several lines counts in B too, and the last of these lines alone has queries that score. How many queries score and
    the local window's size are not given: a line, and as much as is recent. Recent lines have at most two thirds of the
    capacity behind the condition, which are the paper's two lines at its smallest budget. Of an odd number of tokens
    the newer part loses one more, and what one part lacks, the other loses. Nothing is said of guidance: a head is
    local if it is in both branches of a prompt. Eq. 6 has no softmax; Eq. 1 and LineAR, which it follows, have one:
    an option.

    Attributes:
        sinks: leading segments, the condition; lines are the segments behind them.
        group_at: tokens of a head, condition included, beyond which heads are sorted (A.2: 100 for LlamaGen and
            Janus-Pro, 300 and 500 for Lumina-mGPT at 768 and 1024 pixels).
        threshold: share of the attention that decides (tau).
        recent: newest lines that all heads keep.
        local_window: fewer tokens than this make a head local; null for those of the recent lines.
        ratio: older part of the history, as a share of it (r_s).
        leave: tokens leave `half` and half, or from each part in `proportion` to its size.
        buffer: lines between two evictions.
        match_mean: use all of B; false for the paper's layout, where no head has more than B / T.
        len_rows: `shared`, both branches of a prompt have equally many tokens, or `per_row`.
        branch_mode: who decides which tokens leave (`select.BranchMode`).
        attention: what tokens are scored by (`select.score_line`).
    """

    sinks: int
    group_at: int = 100
    threshold: float = 0.9
    recent: int = 2
    local_window: int | None = None
    ratio: float = 0.5
    leave: Literal["half", "proportion"] = "half"
    buffer: int = 1
    match_mean: bool = True
    len_rows: Literal["shared", "per_row"] = "shared"
    branch_mode: BranchMode = "per_row"
    attention: LineAttention = "prob"

    families: ClassVar[tuple[Family, ...]] = ("next-token",)
    limits = set_limits(
        threshold=SHARE,
        ratio=SHARE,
        recent=Limit(1),
        buffer=Limit(1),
        local_window=Limit(1),
        group_at=Limit(0),
    )

    @property
    def heads_independent(self) -> bool:
        """Whether local heads leave their capacity to nobody."""
        return not self.match_mean

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuse branches that cannot agree and a budget too small for the condition and the buffer."""
        super().check(spec, budget)
        if self.branch_mode != "per_row" and self.len_rows == "per_row":
            raise ValueError(
                f"method.branch_mode={self.branch_mode}: branches of unequal length share no tokens; set "
                "method.len_rows=shared"
            )
        check_branch_mode(self.branch_mode, spec)
        check_capacity(spec, budget, self.sinks, (self.buffer - 1) * longest_line(spec, self.sinks))

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Work out when heads are sorted and what heads of each kind have at least."""
        super().prepare(spec, budget, artifact)
        line = longest_line(spec, self.sinks)
        self._condition = spec.leading_tokens(self.sinks)
        self._recent = self.recent * line
        self._min_tokens = min(self._condition + self._recent + (self.buffer - 1) * line, budget.head_tokens)
        self._even = share_by_head(budget.tokens, spec)
        longest = min(self.group_at, budget.head_tokens)
        self._first = next(
            (segment.index for segment in spec.segments if segment.end > longest), len(spec.segments)
        )
        self._local: list[Tensor] = []

    def keep(self, view: View) -> Tensor | None:
        """Sort the layer's heads once; whenever the buffer is full, keep what their kind says."""
        index = view.segment.index
        if index == 0 and view.layer == 0:
            self._local = []
        if index < self._first:
            return None
        if index == self._first:
            self._local.append(self._find_local(view))
        if (index - self._first) % self.buffer:
            return None
        cached = self.spec.segments[:-1]
        following = cached[min(index + self.buffer, len(cached)) - 1]  # the next time
        arriving = following.end - view.segment.end
        capacities = self._share(view.layer) if self.match_mean else self._share_unmatched(view.layer)
        return self._choose(view, capacities.flatten() - arriving, self._local[view.layer].flatten())

    def _find_local(self, view: View) -> Tensor:
        """Return which heads are local, bool [sequences, heads]."""
        received = view.mass(torch.arange(view.segment.length - 1, view.segment.length))
        # Rows of padded prompts are shorter: a slot that a row has not is no token to walk over.
        short = (received.flip(1).cumsum(1) < self.threshold) & (view.position >= 0).flip(1)
        window = self._recent if self.local_window is None else self.local_window
        local = (short.sum(1) + 1 < window).view(view.sequences, view.heads)
        if self.len_rows == "per_row":
            return local
        branches = self.spec.branches
        return local.unflatten(0, (branches, -1)).all(0).repeat(branches, 1)

    def _share_unmatched(self, layer: int) -> Tensor:
        """Return the most that each head holds, int64 [sequences, heads]: an even share, little in local heads."""
        local = self._local[layer]
        even = self._even[layer].to(local.device, non_blocking=True).expand(local.shape)
        return torch.where(local, even.clamp(max=self._min_tokens), even)

    def _share(self, layer: int) -> Tensor:
        """Return the most that each head holds, int64 [sequences, heads], such that all heads together use B.

        The more layers are sorted, the more heads are known to be local, and no head's capacity ever shrinks. The sum
        is therefore within B after every layer.
        """
        spec, total = self.spec, self.budget.tokens
        sorted_ones = torch.stack(self._local)
        local = sorted_ones[layer]
        few = sorted_ones.sum((0, 2))
        others = spec.all_heads - few
        whole = ((total - few * self._min_tokens) // others.clamp(min=1)).clamp(max=spec.cached_length)
        small = ((total - others * spec.cached_length) // few.clamp(min=1)).clamp(min=self._min_tokens)
        capacities = torch.where(local, small[:, None], whole[:, None])
        if len(sorted_ones) < spec.layers:
            return capacities
        # What does not divide goes to the first heads of the kind that can use it.
        left = total - few * small - others * whole
        takers = sorted_ones ^ ((others > 0) & (whole < spec.cached_length))[None, :, None]
        place = takers[:layer].sum((0, 2))[:, None] + takers[layer].cumsum(1)
        return capacities + (takers[layer] & (place <= left[:, None]))

    def _choose(self, view: View, capacity: Tensor, local: Tensor) -> Tensor:
        """Choose what stays, bool [rows, slots].

        Args:
            view: the layer.
            capacity: int64 [rows], slots that each row may keep, the condition among them.
            local: bool [rows], rows that keep no history.
        """
        spare = capacity - self._condition
        recent = torch.where(local, spare, cap_recent(spare).clamp(max=self._recent))
        exists = view.position >= 0
        history = (
            exists & ~find_sinks(view, self.sinks) & (view.position < view.segment.end - recent[:, None])
        )
        size = history.sum(1)
        leaving = (size - (spare - recent)).clamp(min=0)
        older = (size.double() * self.ratio).long()
        part = leaving // 2 if self.leave == "half" else leaving * older // size.clamp(min=1)
        part = part.clamp(max=older).maximum(leaving - (size - older))
        is_older = history & (history.cumsum(1) <= older[:, None])
        scores = merge_branches(score_line(view, self.attention, None), self.branch_mode, self.spec.branches)
        kept = exists & ~history
        for stratum, stays in (
            (is_older, older - part),
            (history & ~is_older, size - older - leaving + part),
        ):
            kept |= choose_best(scores.masked_fill(~stratum, -torch.inf), stays)
        return kept


def longest_line(spec: ModelSpec, sinks: int) -> int:
    """Return the tokens of the longest line, a segment behind the sinks."""
    return max(spec.lengths[sinks:], default=0)
