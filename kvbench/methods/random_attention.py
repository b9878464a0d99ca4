"""Random Attention: a random choice that is drawn anew at every eviction, with a window of the newest tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.methods.shared.draws import DRAWN_ON_HOST, draw_by_row
from kvbench.methods.shared.limits import Limit, set_limits
from kvbench.methods.shared.newest import NewestKept
from kvbench.methods.shared.select import find_begin
from kvbench.methods.shared.view import View


@dataclass
class RandomAttention(NewestKept):
    """Keep the sinks, the newest tokens and a random choice of other tokens, an even share of B in every head.

    Every eviction draws new scores for all candidates, and keeps the highest (arXiv:2609.03430, equation 3). With
    capacity C, window w, l protected tokens and c tokens a segment, a candidate survives an eviction with probability
    p = (C - w - l) / (C - w - l + c), and n evictions with p**n: old tokens are rare. `random` draws once for each
    token, and its choice is uniform over all tokens so far. Heads and layers draw their own scores; the branches of a
    prompt keep the same tokens. The paper protects the prompt, which is `sinks=1` in texts.

    The paper's K does not count the window: its K is B per head less w.

    Attributes:
        window: newest tokens that are kept, at most half of the capacity without sinks; None for 64 in texts, a row in
            next-token image models, and none in next-scale models, whose newest scale would fill the budget.
        shared: whether the heads of a layer draw the same scores.
        block: neighbouring positions that share a score.
        seed: seed of the scores, which also depend on the prompt, the layer and the segment.
    """

    shared: bool = False
    block: int = 1
    seed: int = 0

    limits = set_limits(
        window=Limit(0, wants="must be at least 0, or null for the family's default"), block=Limit(1)
    )
    graph_obstacle = DRAWN_ON_HOST  # draws differ between prompts

    def score(self, view: View) -> Tensor:
        """Return random scores, infinity in the window: float32 [rows, slots]."""
        block = (view.position - find_begin(view)).clamp(min=0) // self.block
        newest = view.position >= view.segment.end - self.count_window(view)
        return self._draw(view).gather(1, block).masked_fill(newest, torch.inf)

    def _draw(self, view: View) -> Tensor:
        """Return uniform scores in [0, 1) per block of positions, float32 [rows, blocks]."""
        blocks = (view.segment.end - 1) // self.block + 1
        return draw_by_row(self.seed, view, self.spec, blocks, shared=self.shared)
