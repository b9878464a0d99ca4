"""LineAR: the condition, the first and the newest lines of an image, and of the rest what the last line attends to."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.core.segments import Family
from kvbench.methods.shared.base import Limit, set_limits
from kvbench.methods.shared.scored import Scored
from kvbench.methods.shared.select import LineAttention, cap_recent, score_line
from kvbench.methods.shared.view import View


@dataclass(kw_only=True)
class LineAR(Scored):
    """Keep condition, anchor lines and recent lines; the middle loses what the line just finished attends to least.

    An image is made line by line, and neighbouring lines attend alike. Whenever a line is finished, each head keeps an
    even share of B: the condition, the first lines of the image (anchors, which settle its style), the newest lines,
    and of the lines between them the tokens that received most attention from the finished line (arXiv:2512.04857,
    ECCV 2026; HeadKV, arXiv:2605.20600, section 4 and Eq. 6 describe the score again).

    Differs from the paper in: its code is not released and its summary gives neither the numbers of lines nor the
    score's softmax, so these are options; HeadKV's defaults stand for two recent lines. The condition counts in B, as
    all that is cached does: B / T = 97 tokens are the paper's 96 (1/6 of LlamaGen's 576) and the class. Of a small
    capacity, recent lines have at most two thirds (both lines at 72 tokens, 1/8 of LlamaGen's 576) and anchors
    at most half of what these leave, so that some is left for the middle.

    Attributes:
        sinks: leading segments, the condition; lines are the segments behind them.
        anchors: first lines that stay.
        recent: newest lines that stay, the finished one among them.
        window: last queries of the finished line that score; null for all.
        attention: their mean probability, or `logit`, their mean score before the softmax (`select.score_line`).
    """

    anchors: int = 1
    recent: int = 2
    window: int | None = None
    attention: LineAttention = "prob"

    families: ClassVar[tuple[Family, ...]] = ("next-token",)
    limits = set_limits(
        anchors=Limit(0),
        recent=Limit(1, wants="must be at least 1, the line just finished"),
        window=Limit(1, wants="must be at least 1, or null for the whole line"),
    )

    def score(self, view: View) -> Tensor:
        """Return what the finished line gives to each slot, infinity for anchors and recent lines: [rows, slots]."""
        condition, anchors, recent = self._protected(view)
        stays = (view.position < condition + anchors) | (view.position >= view.segment.end - recent)
        return score_line(view, self.attention, self.window).masked_fill(stays, torch.inf)

    def _protected(self, view: View) -> tuple[int, int, int]:
        """Return the tokens of the condition, of the anchors and of the recent lines for which there is capacity."""
        condition = self.spec.leading_tokens(self.sinks)
        capacity = self.min_capacity(view) - condition
        newest = self.spec.segments[max(self.sinks, view.segment.index - self.recent + 1)]
        recent = min(view.segment.end - newest.start, cap_recent(capacity))
        lines = min(self.sinks + self.anchors, len(self.spec.segments))
        anchors = self.spec.leading_tokens(lines) - condition
        return condition, min(anchors, (capacity - recent) // 2), recent
