"""Random Attention: a random choice that is drawn anew at every eviction, with a window of the newest tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec
from kvbench.methods.shared.base import Limit, set_limits
from kvbench.methods.shared.draws import DRAWN_ON_HOST, draw_by_row, draw_for_prompts
from kvbench.methods.shared.scored import Scored
from kvbench.methods.shared.select import find_begin, find_sinks
from kvbench.methods.shared.view import View

TEXT_WINDOW = 64
"""Newest tokens of the paper's tables."""


@dataclass
class RandomAttention(Scored):
    """Keep the sinks, the newest tokens and a random choice of the others, an even share of B in every head.

    Every eviction draws new numbers for all candidates, and the highest stay (arXiv:2609.03430, equation 3). With
    capacity C, window w, l protected tokens and c tokens a segment, a candidate survives an eviction with probability
    p = (C - w - l) / (C - w - l + c), and n evictions with p**n: old tokens are rare. `random` draws once for each
    token, and its choice is uniform over all tokens so far. Heads and layers draw their own numbers; the branches of a
    prompt keep the same tokens. The paper protects the prompt, which is `sinks=1` in texts.

    The paper's K does not count the window: its K is B per head less w.

    Attributes:
        window: newest tokens that stay; None for 64 in texts, a row in next-token image models, and none in next-scale
            models, whose newest scale would fill the budget, but at most half of what the sinks leave.
        shared: whether the heads of a layer draw the same numbers.
        block: neighbouring positions that share a number.
        seed: seed of the numbers, which also depend on the prompt, the layer and the segment.
    """

    window: int | None = None
    shared: bool = False
    block: int = 1
    seed: int = 0

    limits = set_limits(
        window=Limit(0, wants="must be at least 0, or null for the family's default"),
        block=Limit(1),
    )

    @property
    def graph_obstacle(self) -> str:
        """Draws differ between prompts."""
        return DRAWN_ON_HOST

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuse `refresh` and `ema`, because every eviction draws anew, and what `Scored` refuses."""
        super().check(spec, budget)
        for name, value, usual in (("refresh", self.refresh, 1), ("ema", self.ema, 0)):
            if value != usual:
                raise ValueError(
                    f"method.{name}={value}: every eviction draws new numbers; set method.{name}={usual}"
                )

    def count_reserved(self, spec: ModelSpec) -> int:
        """Return the tokens of the window, and one that is drawn."""
        return (self.window or 0) + 1

    def score(self, view: View) -> Tensor:
        """Return the number of each token, infinity in the window: float32 [rows, slots]."""
        block = (view.position - find_begin(view)).clamp(min=0) // self.block
        newest = view.position >= view.segment.end - self._count_window(view)
        return self._draw(view).gather(1, block).masked_fill(newest, torch.inf)

    def _draw(self, view: View) -> Tensor:
        """Return numbers in 0..1 by block of positions, float32 [rows, blocks]."""
        blocks = (view.segment.end - 1) // self.block + 1
        if self.shared:
            return draw_for_prompts(self.seed, view, blocks)
        return draw_by_row(self.seed, view, self.spec, blocks)

    def _count_window(self, view: View) -> int | Tensor:
        """Return the tokens of the window, or of each row's window, int64 [rows, 1]."""
        if self.window is not None:
            return self.window
        usual = TEXT_WINDOW if self.spec.writes_text else self.spec.line
        free = self.row_capacities(view) - find_sinks(view, self.sinks, self.leading).sum(1)
        return (free // 2).clamp(min=0, max=usual)[:, None]
