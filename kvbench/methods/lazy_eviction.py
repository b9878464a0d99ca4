"""LazyEviction: eviction by the time since a token last received attention, relative to its recurrence interval."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.core.segments import Family, ModelSpec
from kvbench.methods.shared.limits import Limit, set_limits
from kvbench.methods.shared.scored import Scored
from kvbench.methods.shared.view import View

QUERY_BATCH = 32
"""Maximum number of queries whose attention is in memory at a time."""


@dataclass(kw_only=True)
class LazyEviction(Scored):
    """Keep the newest tokens and the tokens whose time since the last hit is short for their recurrence interval.

    A query hits the tokens to which it gives at least `alpha` attention. Each token stores the step T of its last hit
    and the longest interval M between two hits, which is 0 without a hit. Its importance at step t is
    2 sigmoid(-1 - (t - T) / M) + [M > 0] 2 sigmoid(1 - M). It decreases with (t - T) / M and with M
    (arXiv:2506.15969). Eviction happens once per segment instead of every W steps: W is the model's `chunk`. Steps are
    counted from the end of the prompt.

    Formulas follow a public port of the released code, because the paper's text was not available. `formula=paper` is
    printed in summaries of it: 2 sigmoid(-(t - T) / M) + [M > 0] 2 sigmoid(-1 / M). Its second term increases with M,
    although the text says that short intervals weigh more. It is for ablations.

    Differs from the released code in: the code stores keys for each query head. Here the query heads of a KV head share
    its slots, and a slot is hit if any of them hits it. The budget in the paper's tables is larger by this factor.

    Attributes:
        alpha: minimum attention of a hit.
        window: newest tokens that are always kept; None for the length of the longest segment after the prompt.
        group: attention of a KV head, the `max` or the `mean` over its query heads.
        formula: `program` or `paper`.
    """

    alpha: float = 1e-4
    window: int | None = None
    group: Literal["max", "mean"] = "max"
    formula: Literal["program", "paper"] = "program"

    families: ClassVar[tuple[Family, ...]] = ("next-token",)
    own_state: ClassVar[int] = 2
    revision: ClassVar[int] = 0
    limits = set_limits(
        alpha=Limit(1e-12, 1, "must lie above 0 and not above 1"),
        window=Limit(1, wants="must be at least 1, or null for a segment"),
    )

    def count_reserved(self, spec: ModelSpec) -> int:
        """Return the tokens that a head must hold: the window plus one."""
        return self._count_window(spec) + 1

    def observe(self, view: View) -> None:
        """Update last hits and longest intervals, query by query, after the prompt."""
        length = view.segment.length
        if not view.segment.index:
            return
        last, interval = view.state.unbind(-1)
        last[:, -length:] = (view.position[:, -length:] - self._start).float()
        for chosen in torch.arange(length).split(QUERY_BATCH):
            attention = view.scores(chosen).softmax(-1)
            attention = attention.amax(1) if self.group == "max" else attention.mean(1)
            for query, received in zip(chosen.tolist(), attention.unbind(1), strict=True):
                step, hit = view.segment.start + query - self._start + 1, received >= self.alpha
                interval.copy_(torch.where(hit, interval.maximum(step - last), interval))
                last.masked_fill_(hit, step)

    def score(self, view: View) -> Tensor:
        """Return the importance of each slot, float32 [rows, slots]; infinity in the window."""
        last, interval = view.state.unbind(-1)
        importance = measure_importance(view.segment.end - self._start - last, interval, self.formula)
        newest = view.position >= view.segment.end - self._count_window(self.spec)
        return importance.masked_fill(newest, torch.inf)

    @property
    def _start(self) -> int:
        """Position of the first token after the prompt, whose query is step 1."""
        return self.spec.segments[0].end

    def _count_window(self, spec: ModelSpec) -> int:
        return self.window or max(spec.lengths[1:], default=1)


def measure_importance(quiet: Tensor, interval: Tensor, formula: Literal["program", "paper"]) -> Tensor:
    """Return the importance of tokens by `LazyEviction.formula`, float32 in the shape of the arguments.

    `quiet` is t - T, the steps since the last hit; `interval` is M, the longest interval between two hits, 0 without
    any.
    """
    hit = interval > 0
    if formula == "program":
        return 2 * torch.sigmoid(-1 - quiet / (interval + 1e-5)) + hit * 2 * torch.sigmoid(1 - interval)
    ratio = torch.where(quiet > 0, quiet / interval, 0)  # infinite without a hit
    return 2 * torch.sigmoid(-ratio) + hit * 2 * torch.sigmoid(-1 / interval.clamp(min=1))
