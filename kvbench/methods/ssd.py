"""SSD: heads that look nearby keep the newest image tokens, others the most attended (arXiv:2510.18716)."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import Family, ModelSpec, Segment
from kvbench.methods.shared.base import SHARE, Artifact, Limit, Observer, require_artifact, set_limits
from kvbench.methods.shared.scored import Scored
from kvbench.methods.shared.select import cap_recent
from kvbench.methods.shared.view import View


@dataclass
class DistantAttention(Observer):
    """Calibrates `distant` [L, H]: the share of its attention to image tokens that a head pays outside a neighbourhood.

    The neighbourhood of a token is itself, the tokens shortly before it, and those around its place in the row above.
    Mean over all image tokens, conditional sequences, and the query heads of a KV head.

    Attributes:
        near: tokens before it.
        above: tokens to either side of the place above.
    """

    near: int = 3
    above: int = 1

    kind: ClassVar[str] = "distant_attention"
    families: ClassVar[tuple[Family, ...]] = ("next-token",)

    def tensor_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """Return [L, H] of `distant`."""
        return {"distant": (spec.layers, spec.heads)}

    def accumulate(self, view: View) -> None:
        """Add the segment's queries, each as its part of all image tokens."""
        segment = view.segment
        if not segment.index:
            return
        chosen = torch.arange(segment.length)
        offset = (segment.start + chosen).to(view.position.device)[:, None] - view.position[:, None]
        image = (view.segment_ids > 0)[:, None] & (offset >= 0)
        line = count_line(self.spec)
        close = (offset <= self.near) | ((offset - line).abs() <= self.above)
        attention = view.scores(chosen).softmax(-1).mean(1)
        shares = [(attention * part).sum(-1) for part in (image & ~close, image)]
        distant = (shares[0] / shares[1].clamp(min=1e-30)).sum(-1)
        queries = self.spec.segments[-1].end - self.spec.segments[0].end
        self.sums["distant"][view.layer] += self.select_conditional(distant).sum(0) / queries


@dataclass(kw_only=True)
class SSD(Scored):
    """Spatial heads keep the newest image tokens, semantic heads the most attended ones; all keep the condition.

    Heads are sorted once, by a calibration: a head is spatial if less than `threshold` of its attention to image tokens
    falls outside a token's neighbourhood. Spatial heads keep a window of the newest image tokens; semantic heads keep
    the image tokens of most attention, summed over all queries so far, and the newest of them. The classes' capacities
    do not depend on data, and all heads together use B.

    This is a reading. The paper's abstract gives the two classes, what each keeps, and that the condition stays; its
    formulas were not at hand. Choices made here, each an option: the neighbourhood (`near`, `above`); the threshold;
    what spatial heads hold (`window`), from which the capacity of semantic heads follows; sums of attention as the
    score, or the newest row's alone (`accumulate`); newest tokens that stay in semantic heads (`recent`). Decisions
    come with every row of the image (`model.chunk`).

    Attributes:
        sinks: leading segments, the condition.
        threshold: share of distant attention from which a head is semantic.
        near: tokens before a token in its neighbourhood.
        above: tokens to either side of the place above it.
        window: image tokens of spatial heads; None for a row and one more, so that the place above is among them.
        recent: newest image tokens that stay in semantic heads, at most two thirds of what they hold; None for a row.
        accumulate: semantic heads score by attention summed over all queries, or by that of the `newest` segment.
    """

    threshold: float = 0.5
    near: int = 3
    above: int = 1
    window: int | None = None
    recent: int | None = None
    accumulate: Literal["all", "newest"] = "all"

    families: ClassVar[tuple[Family, ...]] = ("next-token",)
    accumulates: ClassVar[bool] = True
    revision: ClassVar[int] = 0
    limits = set_limits(
        threshold=SHARE,
        near=Limit(0),
        above=Limit(0),
        window=Limit(1, wants="must be at least 1, or null for a row and one"),
        recent=Limit(0, wants="must be at least 0, or null for a row"),
    )

    def needs(self) -> Observer | Path:
        """Return the calibration that sorts heads."""
        return DistantAttention(self.near, self.above)

    def count_reserved(self, spec: ModelSpec) -> int:
        """Return one image token."""
        return 1

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Sort the heads and share the budget between the classes."""
        super().prepare(spec, budget, artifact)
        distant = require_artifact(artifact, "method=ssd:")["distant"]
        self.is_spatial = distant < self.threshold
        condition, line = spec.leading_tokens(self.sinks), count_line(spec)
        window = min(condition + (self.window or line + 1), budget.head_tokens)
        self.capacities = share_classes(self.is_spatial, window, budget.tokens, spec.cached_length)
        self._layer_capacities = [tuple(row) for row in self.capacities.tolist()]
        self._recent = line if self.recent is None else self.recent

    def share(self, layer: int, segment: Segment) -> tuple[int, ...]:
        """Return the capacity of each head's class."""
        return self._layer_capacities[layer]

    def observe(self, view: View) -> None:
        """Add the segment's attention to every slot's sum, or put it in its place."""
        received = view.mass() * view.segment.length
        view.state.copy_(received if self.accumulate == "newest" else view.state + received)

    def score(self, view: View) -> Tensor:
        """Return the position of each slot in spatial heads, the attention it received in others: [rows, slots]."""
        device, layer = view.position.device, view.layer
        spatial = self.is_spatial[layer].to(device, non_blocking=True).repeat(view.sequences)[:, None]
        room = self.capacities[layer] - self.spec.leading_tokens(self.sinks)
        recent = cap_recent(room).clamp(max=self._recent).to(device, non_blocking=True).repeat(view.sequences)
        newest = view.position >= view.segment.end - recent[:, None]
        attended = view.state.masked_fill(newest, torch.inf)
        return torch.where(spatial, view.position.float(), attended)


def count_line(spec: ModelSpec) -> int:
    """Return the tokens of a row of the image; of a text, those of its longest segment behind the prompt."""
    return spec.line or max(spec.lengths[1:], default=1)


def share_classes(small: Tensor, capacity: int, tokens: int, full: int) -> Tensor:
    """Return the capacity of each head, int64 [L, H], such that all heads together have `tokens`.

    Heads of the small class have `capacity`, and more where the others cannot use the rest. What does not divide goes
    to the first heads that can use it.

    Args:
        small: bool [L, H].
        capacity: of heads of the small class, at most the mean.
        tokens: B.
        full: tokens that a head can hold at most.
    """
    few, heads = int(small.sum()), small.numel()
    if few in (0, heads):
        shares = torch.full_like(small, tokens // heads, dtype=torch.int64)
        takers = torch.ones_like(small)
    else:
        least = max(capacity, (tokens - (heads - few) * full) // few)
        rest = min((tokens - few * least) // (heads - few), full)
        shares = torch.where(small, least, rest)
        takers = small if rest == full else ~small
    left = tokens - int(shares.sum())
    shares.view(-1)[takers.flatten().nonzero()[:left, 0]] += 1
    return shares
