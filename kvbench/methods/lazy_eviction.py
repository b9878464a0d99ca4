"""LazyEviction: tokens whose attention comes back after quiet spells stay as long as such spells last."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.core.segments import Family, ModelSpec
from kvbench.methods.shared.base import Limit, set_limits
from kvbench.methods.shared.scored import Scored
from kvbench.methods.shared.view import View

QUERIES_AT_ONCE = 32
"""Queries whose attention is held at a time."""


@dataclass(kw_only=True)
class LazyEviction(Scored):
    """Keep a window of newest tokens and those whose time since the last hit is short beside their recurrence interval.

    A query hits the tokens whose attention from it is at least `alpha`. Each token remembers the step T of its last
    hit and the longest interval M between two hits; a token that was never hit has M = 0. Its importance at step t is
    2 sigmoid(-1 - (t - T) / M) + [M > 0] 2 sigmoid(1 - M): it falls with the quiet spell relative to M and with M
    (arXiv:2506.15969). Decisions come once per segment, not at every step; the paper's interval is W, here `chunk` of
    the model. The clock starts behind the prompt.

    Formulas follow a public port of the released code. The paper's own text was not at hand; `formula=paper` is what
    summaries of it print, 2 sigmoid(-(t - T) / M) + [M > 0] 2 sigmoid(-1 / M), whose second term rises with M although
    the text says that short intervals weigh more. It is for ablations.

    Differs from the released code in: it stores keys for every query head; here the query heads of a KV head share its
    slots, and a slot is hit if one of them hits it. The budget of its tables is therefore as many times larger.

    Attributes:
        alpha: attention of a hit.
        window: newest tokens that always stay; None for as many as the model's longest segment behind the prompt.
        group: a slot is hit by the `max` or the `mean` of the attention from the query heads that share it.
        formula: `program` or `paper`.
    """

    alpha: float = 1e-4
    window: int | None = None
    group: Literal["max", "mean"] = "max"
    formula: Literal["program", "paper"] = "program"

    families: ClassVar[tuple[Family, ...]] = ("next-token",)
    accumulates: ClassVar[bool] = True
    revision: ClassVar[int] = 0
    numbers: ClassVar[int] = 2
    limits = set_limits(
        alpha=Limit(1e-12, 1, "must lie above 0 and not above 1"),
        window=Limit(1, wants="must be at least 1, or null for a segment"),
    )

    def count_reserved(self, spec: ModelSpec) -> int:
        """Return the tokens of the window, and one more."""
        return self._count_window(spec) + 1

    def observe(self, view: View) -> None:
        """Note the hits of the queries behind the prompt."""
        if view.segment.index:
            self._note_hits(view)

    def score(self, view: View) -> Tensor:
        """Return the importance of each slot, float32 [rows, slots]; infinity in the window."""
        last, interval = view.state.unbind(-1)
        importance = measure_importance(view.segment.end - self._start - last, interval, self.formula)
        newest = view.position >= view.segment.end - self._count_window(self.spec)
        return importance.masked_fill(newest, torch.inf)

    @property
    def _start(self) -> int:
        """Position of the first token behind the prompt, whose query comes at step 1."""
        return self.spec.segments[0].end

    def _count_window(self, spec: ModelSpec) -> int:
        return self.window or max(spec.lengths[1:], default=1)

    def _note_hits(self, view: View) -> None:
        """Update last hits and longest intervals, query by query."""
        length = view.segment.length
        last, interval = view.state.unbind(-1)
        last[:, -length:] = (view.position[:, -length:] - self._start).float()
        for chosen in torch.arange(length).split(QUERIES_AT_ONCE):
            attention = view.scores(chosen).softmax(-1)
            attention = attention.amax(1) if self.group == "max" else attention.mean(1)
            for query, received in zip(chosen.tolist(), attention.unbind(1), strict=True):
                step, hit = view.segment.start + query - self._start + 1, received >= self.alpha
                interval.copy_(torch.where(hit, interval.maximum(step - last), interval))
                last.masked_fill_(hit, step)


def measure_importance(quiet: Tensor, interval: Tensor, formula: Literal["program", "paper"]) -> Tensor:
    """Return the importance of tokens, float32.

    Args:
        quiet: steps since the last hit, t - T.
        interval: longest interval between two hits M; 0 if there was none.
        formula: see `LazyEviction`.
    """
    hit = interval > 0
    if formula == "program":
        return 2 * torch.sigmoid(-1 - quiet / (interval + 1e-5)) + hit * 2 * torch.sigmoid(1 - interval)
    ratio = torch.where(quiet > 0, quiet / interval, 0)  # infinite where nothing was hit
    return 2 * torch.sigmoid(-ratio) + hit * 2 * torch.sigmoid(-1 / interval.clamp(min=1))
