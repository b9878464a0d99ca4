"""SSD: spatial heads keep the newest image tokens, semantic heads the most attended tokens (arXiv:2510.18716)."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import Family, ModelSpec
from kvbench.methods.shared.calibration import Artifact, Observer, require_artifact
from kvbench.methods.shared.limits import SHARE, Limit, set_limits
from kvbench.methods.shared.scored import Scored
from kvbench.methods.shared.select import count_sinks, max_recent_tokens, sum_attention
from kvbench.methods.shared.view import View


@dataclass
class DistantAttention(Observer):
    """Calibration of `distant` [L, H]: share of a head's attention to image tokens outside a token's neighbourhood.

    The neighbourhood of a token is the token, the tokens just before it, and tokens around its column in the row above.
    The mean is over all image tokens, conditional sequences, and the query heads of a KV head.

    Attributes:
        near: tokens before the token.
        above: tokens to either side of the token above.
    """

    near: int = 3
    above: int = 1

    kind: ClassVar[str] = "distant_attention"

    def tensor_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """Return the shape [L, H] of `distant`."""
        return {"distant": (spec.layers, spec.heads)}

    def accumulate(self, view: View) -> None:
        """Add the segment's queries, each weighted by 1 / image tokens."""
        segment = view.segment
        if not segment.index:
            return
        chosen = torch.arange(segment.length)
        offset = (segment.start + chosen).to(view.position.device)[:, None] - view.position[:, None]
        image = (view.segment_ids > 0)[:, None] & (offset >= 0)
        line = count_line(self.spec)
        close = (offset <= self.near) | ((offset - line).abs() <= self.above)
        attention = view.scores(chosen).softmax(-1).mean(1)
        outside, total = ((attention * mask).sum(-1) for mask in (image & ~close, image))
        distant = (outside / total.clamp(min=1e-30)).sum(-1)
        queries = self.spec.segments[-1].end - self.spec.segments[0].end
        self.sums["distant"][view.layer] += self.select_conditional(distant).sum(0) / queries


@dataclass(kw_only=True)
class SSD(Scored):
    """Keep the newest image tokens in spatial heads, the most attended in semantic heads, the condition in all heads.

    A calibration classifies the heads once: a head is spatial if less than `threshold` of its attention to image tokens
    is outside a token's neighbourhood. Spatial heads keep a window of the newest image tokens. Semantic heads keep the
    newest image tokens and the image tokens of most attention, summed over all queries so far. The capacities of both
    classes do not depend on data, and all heads together use B.

    Differs from the paper in: only the abstract was available, which gives the two classes, what each keeps, and that
    the condition is kept. The rest are options: the neighbourhood (`near`, `above`); the threshold; the capacity of
    spatial heads (`window`), which determines the semantic heads' capacity; attention summed over all rows, or from the
    newest row (`accumulate`); newest tokens that semantic heads keep (`recent`). Eviction follows each row of the image
    (`model.chunk`).

    Attributes:
        sinks: leading segments, the condition.
        threshold: minimum share of distant attention of a semantic head.
        near: tokens before a token in its neighbourhood.
        above: tokens to either side of the token above it.
        window: image tokens of spatial heads; None for a row plus one, which includes the token above.
        recent: newest image tokens that semantic heads keep, at most two thirds of their capacity; None for a row.
        accumulate: score semantic heads by attention summed over `all` queries, or by the `newest` segment's.
    """

    threshold: float = 0.5
    near: int = 3
    above: int = 1
    window: int | None = None
    recent: int | None = None
    accumulate: Literal["all", "newest"] = "all"

    families: ClassVar[tuple[Family, ...]] = ("next-token",)
    own_state: ClassVar[int] = 1
    uniform_capacity = False  # classes have budgets of their own
    revision: ClassVar[int] = 2  # before, capacities were for the longest prompt of texts
    limits = set_limits(
        threshold=SHARE,
        near=Limit(0),
        above=Limit(0),
        window=Limit(1, wants="must be at least 1, or null for a row and one"),
        recent=Limit(0, wants="must be at least 0, or null for a row"),
    )

    def needs(self) -> Observer | Path:
        """Return the calibration that classifies heads."""
        return DistantAttention(self.near, self.above)

    def count_reserved(self, spec: ModelSpec) -> int:
        """Return 1: besides sinks, a head must hold one token of the image."""
        return 1

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Classify heads as spatial or semantic, and share the budget between these classes."""
        super().prepare(spec, budget, artifact)
        distant = require_artifact(artifact, "method=ssd:")["distant"]
        self.is_spatial = distant < self.threshold
        condition, line = count_sinks(spec, self.sinks, self.leading), count_line(spec)
        window = min(condition + (self.window or line + 1), budget.head_tokens)
        self.capacities = share_classes(self.is_spatial, window, budget.tokens, spec.cached_length)
        self.assign_capacities(self.capacities.expand(len(spec.segments), -1, -1))
        self._recent = line if self.recent is None else self.recent

    def observe(self, view: View) -> None:
        """Add the segment's attention to each slot's sum, or replace the sum."""
        received = sum_attention(view)
        view.state.copy_(received if self.accumulate == "newest" else view.state + received)

    def score(self, view: View) -> Tensor:
        """Return slots' positions in spatial heads, their attention in semantic heads: float32 [rows, slots]."""
        plans = self.list_plans(view)
        plans *= view.sequences // len(plans)
        sinks = [count_sinks(plan.spec, self.sinks, self.leading) for plan in plans]
        capacities = [plan.capacities[view.layer] - tokens for plan, tokens in zip(plans, sinks, strict=True)]
        by_head = (
            self.is_spatial[view.layer].repeat(view.sequences),
            max_recent_tokens(torch.cat(capacities)).clamp(max=self._recent),
        )
        spatial, recent = (x.to(view.position.device, non_blocking=True)[:, None] for x in by_head)
        newest = view.position >= view.segment.end - recent
        attended = view.state.masked_fill(newest, torch.inf)
        return torch.where(spatial, view.position.float(), attended)


def count_line(spec: ModelSpec) -> int:
    """Return the tokens of a row of the image, or of a text's longest segment after the prompt."""
    return spec.line or max(spec.lengths[1:], default=1)


def share_classes(small: Tensor, capacity: int, tokens: int, full: int) -> Tensor:
    """Return the capacity of each head, int64 [L, H], such that all heads together have `tokens`, the budget B.

    Heads of the small class, bool [L, H], have `capacity`, at most the mean, or more if other heads cannot use the
    rest: a head has at most `full` tokens. The remainder goes to the first heads that can use it.
    """
    few, heads = int(small.sum()), small.numel()
    if few in (0, heads):
        shares = torch.full_like(small, tokens // heads, dtype=torch.int64)
        takers = torch.ones_like(small)
    else:
        capacity = max(capacity, (tokens - (heads - few) * full) // few)
        large = min((tokens - few * capacity) // (heads - few), full)
        shares = torch.where(small, capacity, large)
        takers = small if large == full else ~small
    remainder = tokens - int(shares.sum())
    shares.view(-1)[takers.flatten().nonzero()[:remainder, 0]] += 1
    return shares
