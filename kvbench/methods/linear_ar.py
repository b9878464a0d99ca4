"""LineAR: the condition, the first and newest lines of an image, and other tokens by attention from the last line."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.core.segments import Family
from kvbench.methods.shared.limits import Limit, set_limits
from kvbench.methods.shared.scored import Scored
from kvbench.methods.shared.select import (
    LineAttention,
    expand_to_rows,
    find_begin,
    max_recent_tokens,
    score_line,
)
from kvbench.methods.shared.view import View


@dataclass(kw_only=True)
class LineAR(Scored):
    """Keep the condition, anchor lines and recent lines; in the middle, keep what the last line attends to most.

    An image is generated line by line, and neighbouring lines have similar attention. After each line, each head keeps
    an even share of B: the condition, the first lines of the image (anchors, which determine its style), the newest
    lines, and the tokens of other lines with most attention from the last line (arXiv:2512.04857, ECCV 2026; HeadKV,
    arXiv:2605.20600, section 4 and Eq. 6, also describes the score).

    Differs from the paper in: the code is not released, and the summary gives neither the numbers of lines nor the
    softmax of the score, so these are options; two recent lines are HeadKV's default. The condition counts in B:
    B / T = 97 tokens are the paper's 96 (1/6 of LlamaGen's 576) and the class. In a small capacity, recent lines use at
    most two thirds (both lines at 72 tokens, 1/8 of LlamaGen's 576) and anchors at most half of the rest, which leaves
    some for the middle.

    Attributes:
        sinks: leading segments, the condition; later segments are lines.
        anchors: first lines that are kept.
        recent: newest lines that are kept, including the last line.
        window: last queries of the last line that score; null for all.
        attention: `prob`, mean probability, or `logit`, mean score before the softmax (`select.score_line`).
    """

    anchors: int = 1
    recent: int = 2
    window: int | None = None
    attention: LineAttention = "prob"

    families: ClassVar[tuple[Family, ...]] = ("next-token",)
    revision: ClassVar[int] = 2  # before, padding in front of a prompt reduced what is kept
    limits = set_limits(
        anchors=Limit(0),
        recent=Limit(1, wants="must be at least 1, the last line"),
        window=Limit(1, wants="must be at least 1, or null for the whole line"),
    )

    def score(self, view: View) -> Tensor:
        """Return the attention from the last line, infinity for anchors and recent lines: float32 [rows, slots]."""
        kept = [plan._count_protected(view) for plan in self.list_plans(view)]
        leading, recent = (expand_to_rows(view, tokens)[:, None] for tokens in zip(*kept, strict=True))
        stays = (view.position - find_begin(view) < leading) | (view.position >= view.segment.end - recent)
        return score_line(view, self.attention, self.window).masked_fill(stays, torch.inf)

    def _count_protected(self, view: View) -> tuple[int, int]:
        """Return the tokens of condition and anchors, and of recent lines, that fit the capacity."""
        condition = self.spec.leading_tokens(self.sinks)
        capacity = self.min_capacity(view) - condition
        newest = self.spec.segments[max(self.sinks, view.segment.index - self.recent + 1)]
        recent = min(self.spec.ends[view.segment.index] - newest.start, max_recent_tokens(capacity))
        lines = min(self.sinks + self.anchors, len(self.spec.segments))
        anchors = self.spec.leading_tokens(lines) - condition
        return condition + min(anchors, (capacity - recent) // 2), recent
