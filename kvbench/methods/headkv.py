"""HeadKV: local heads keep only the newest lines, global heads also keep history (arXiv:2605.20600)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import Family, ModelSpec
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.calibration import Artifact
from kvbench.methods.shared.capacities import share_by_head
from kvbench.methods.shared.limits import SHARE, Limit, set_limits
from kvbench.methods.shared.select import (
    BranchMode,
    LineAttention,
    check_branch_mode,
    check_capacity,
    choose_best,
    count_sinks,
    expand_to_rows,
    find_sinks,
    max_recent_tokens,
    merge_branches,
    score_line,
    to_view_device,
)
from kvbench.methods.shared.view import View


@dataclass(kw_only=True)
class HeadKV(Method):
    """Classify heads as local or global while an image is generated; local heads keep no history.

    Once the cache is long enough, each KV head of each layer is classified by the attention from the newest query. A
    head is local if `threshold` of this attention falls on the newest tokens, on fewer than the local window (section
    4, step 2). From then on, local heads keep the condition and the recent lines (Eq. 3); global heads also keep as
    much history as fits (Eq. 4). History is evicted in two strata, the older part (a share `ratio`, Eq. 5) and the
    newer part. Half of the evicted tokens come from each part: the least attended from the last line (Eq. 6).

    With `match_mean`, all heads of a sequence together use B: global heads get the capacity that local heads do not
    use. Layers that are not classified yet count as global, so that the budget holds after every layer. If all global
    heads keep their whole history, local heads get the rest.

    Differs from the paper in: heads are classified at the first end of a line at which the cache is longer than
    `group_at` or than B / T, which it never exceeds; the paper caches more until then. The condition counts in B: B / T
    = 97 tokens are the paper's 96 (1/6 of LlamaGen's 576) and the class. A buffer of several lines counts in B too, and
    only the queries of its last line score. The paper does not give the number of scoring queries (here a line) or the
    local window (here the recent lines). Recent lines use at most two thirds of the capacity after the condition, which
    are the paper's two lines at its smallest budget. If the number of evicted tokens is odd, the newer part loses one
    more; if one part is too short, the other loses the rest. The paper does not discuss guidance: here a head is local
    if it is local in both branches of a prompt. Eq. 6 has no softmax, but Eq. 1 and LineAR, which it follows, do: this
    is an option.

    Attributes:
        sinks: leading segments, the condition; later segments are lines.
        leading: first tokens of a sequence, after its padding, that are never evicted.
        group_at: cached tokens of a head, condition included, above which heads are classified (A.2: 100 for LlamaGen
            and Janus-Pro, 300 and 500 for Lumina-mGPT at 768 and 1024 pixels).
        threshold: share of attention that classifies a head (tau).
        recent: newest lines that all heads keep.
        local_window: number of tokens below which a head is local; null for the length of the recent lines.
        ratio: share of the history that is the older part (r_s).
        leave: evict `half` from each part, or from each in `proportion` to its size.
        buffer: lines between two evictions.
        match_mean: use all of B; false for the paper's layout, where no head has more than B / T.
        len_rows: `shared` keeps the same number of tokens in both branches of a prompt; or `per_row`.
        branch_mode: branch whose scores decide (`select.BranchMode`).
        attention: score of a token (`select.score_line`).
    """

    sinks: int
    leading: int = 0
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
    revision: ClassVar[int] = 1  # before, padding in front of a prompt reduced what is kept
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
        """Whether capacity stays in its head: global heads do not get what local heads do not use."""
        return not self.match_mean

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuse incompatible branch settings, and a budget below the condition and the buffer."""
        super().check(spec, budget)
        if self.branch_mode != "per_row" and self.len_rows == "per_row":
            raise ValueError(
                f"method.branch_mode={self.branch_mode}: branches of unequal length share no tokens; set "
                "method.len_rows=shared"
            )
        check_branch_mode(self.branch_mode, spec)
        buffered = (self.buffer - 1) * longest_line(spec, self.sinks)
        check_capacity(spec, budget, self.sinks, buffered, leading=self.leading)

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Find the segment that classifies heads, and the minimum capacity of heads."""
        super().prepare(spec, budget, artifact)
        line = longest_line(spec, self.sinks)
        self._condition = count_sinks(spec, self.sinks, self.leading)
        self._recent = self.recent * line
        self._min_tokens = min(self._condition + self._recent + (self.buffer - 1) * line, budget.head_tokens)
        self._even = share_by_head(budget.tokens, spec)
        longest = min(self.group_at, budget.head_tokens)
        self._first = sum(end <= longest for end in spec.ends)
        self._local: list[Tensor] = []

    def keep(self, view: View) -> Tensor | None:
        """Classify heads once; evict by class when the buffer is full: bool [rows, slots], otherwise None."""
        index, plans = view.segment.index, self.list_plans(view)
        if index == 0 and view.layer == 0:
            self._local = []
        firsts = [plan._first for plan in plans]
        if index < min(firsts):
            return None
        if index in firsts:
            self._classify(view, plans)
        due = [index >= first and (index - first) % self.buffer == 0 for first in firsts]
        if not any(due):
            return None
        cached_ends = self.spec.ends[:-1]
        next_eviction = cached_ends[min(index + self.buffer, len(cached_ends)) - 1]
        arriving = next_eviction - view.segment.end
        capacities = self._share(view, plans) if self.match_mean else self._share_unmatched(view, plans)
        chosen = self._choose(view, capacities.flatten() - arriving, self._local[view.layer].flatten(), plans)
        return chosen if all(due) else chosen | ~expand_to_rows(view, due)[:, None]

    def _classify(self, view: View, plans: Sequence[Self]) -> None:
        """Classify the layer's heads in the sequences that evict for the first time."""
        local = self._find_local(view, plans)
        if any(plan._first != view.segment.index for plan in plans):
            now = expand_to_rows(view, [plan._first == view.segment.index for plan in plans]).view_as(local)
            before = self._local[view.layer] if len(self._local) > view.layer else torch.zeros_like(local)
            local = torch.where(now, local, before)
        self._local[view.layer : view.layer + 1] = [local]

    def _find_local(self, view: View, plans: Sequence[Self]) -> Tensor:
        """Return which heads are local, bool [sequences, heads]."""
        received = view.mass(torch.arange(view.segment.length - 1, view.segment.length))
        # Padded prompts have shorter rows; their missing slots are not counted.
        short = (received.flip(1).cumsum(1) < self.threshold) & (view.position >= 0).flip(1)
        window = expand_to_rows(view, [plan._recent for plan in plans])
        local = (short.sum(1) + 1 < (self.local_window or window)).view(view.sequences, view.heads)
        if self.len_rows == "per_row":
            return local
        branches = self.spec.branches
        return local.unflatten(0, (branches, -1)).all(0).repeat(branches, 1)

    def _share_unmatched(self, view: View, plans: Sequence[Self]) -> Tensor:
        """Return the capacity of each head, int64 [sequences, heads]: an even share, the minimum in local heads."""
        local = self._local[view.layer]
        even = self._even[view.layer].to(local.device, non_blocking=True).expand(local.shape)
        least = to_view_device(view, [plan._min_tokens for plan in plans])[:, None]
        return torch.where(local, even.minimum(least), even)

    def _share(self, view: View, plans: Sequence[Self]) -> Tensor:
        """Return the capacity of each head, int64 [sequences, heads], such that all heads together use B.

        As more layers are classified, more heads are known to be local, and no capacity shrinks. The sum is therefore
        within B after every layer.
        """
        spec, total, layer = self.spec, self.budget.tokens, view.layer
        least = to_view_device(view, [plan._min_tokens for plan in plans])
        longest = to_view_device(view, [plan.spec.cached_length for plan in plans])
        is_local = torch.stack(self._local)
        local_heads = is_local.sum((0, 2))
        global_heads = spec.all_heads - local_heads
        large = ((total - local_heads * least) // global_heads.clamp(min=1)).minimum(longest)
        small = ((total - global_heads * longest) // local_heads.clamp(min=1)).maximum(least)
        capacities = torch.where(is_local[layer], small[:, None], large[:, None])
        classified = [plan._first < view.segment.index or layer == spec.layers - 1 for plan in plans]
        if not any(classified):
            return capacities
        # The remainder goes to the first heads of the class that can use it.
        remainder = total - local_heads * small - global_heads * large
        remainder *= to_view_device(view, classified)
        takers = is_local ^ ((global_heads > 0) & (large < longest))[None, :, None]
        rank = takers[:layer].sum((0, 2))[:, None] + takers[layer].cumsum(1)
        return capacities + (takers[layer] & (rank <= remainder[:, None]))

    def _choose(self, view: View, capacity: Tensor, local: Tensor, plans: Sequence[Self]) -> Tensor:
        """Choose the slots to keep, bool [rows, slots].

        `capacity`, int64 [rows], counts the condition; rows that are `local`, bool [rows], keep no history.
        """
        spare = capacity - expand_to_rows(view, [plan._condition for plan in plans])
        lines = expand_to_rows(view, [plan._recent for plan in plans])
        recent = torch.where(local, spare, max_recent_tokens(spare).minimum(lines))
        exists = view.position >= 0
        sinks = find_sinks(view, self.sinks, self.leading)
        history = exists & ~sinks & (view.position < view.segment.end - recent[:, None])
        size = history.sum(1)
        leaving = (size - (spare - recent)).clamp(min=0)
        older = (size.double() * self.ratio).long()
        from_older = leaving // 2 if self.leave == "half" else leaving * older // size.clamp(min=1)
        from_older = from_older.clamp(max=older).maximum(leaving - (size - older))
        is_older = history & (history.cumsum(1) <= older[:, None])
        scores = merge_branches(score_line(view, self.attention, None), self.branch_mode, self.spec.branches)
        best_older = choose_best(scores.masked_fill(~is_older, -torch.inf), older - from_older)
        newer = scores.masked_fill(~(history & ~is_older), -torch.inf)
        return (exists & ~history) | best_older | choose_best(newer, size - older - leaving + from_older)


def longest_line(spec: ModelSpec, sinks: int) -> int:
    """Return the tokens of the longest line, a segment after the sinks."""
    return max(spec.lengths[sinks:], default=0)
