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

    shared: bool = False
    block: int = 1
    seed: int = 0

    limits = set_limits(
        window=Limit(0, wants="must be at least 0, or null for the family's default"), block=Limit(1)
    )
    graph_obstacle = DRAWN_ON_HOST  # draws differ between prompts

    def score(self, view: View) -> Tensor:
        """Return the number of each token, infinity in the window: float32 [rows, slots]."""
        block = (view.position - find_begin(view)).clamp(min=0) // self.block
        newest = view.position >= view.segment.end - self.count_window(view)
        return self._draw(view).gather(1, block).masked_fill(newest, torch.inf)

    def _draw(self, view: View) -> Tensor:
        """Return numbers in 0..1 by block of positions, float32 [rows, blocks]."""
        blocks = (view.segment.end - 1) // self.block + 1
        return draw_by_row(self.seed, view, self.spec, blocks, shared=self.shared)
