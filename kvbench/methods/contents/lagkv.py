"""LagKV: tokens that differ most from those behind them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.methods.shared.base import Limit, set_limits
from kvbench.methods.shared.grouped import sum_runs
from kvbench.methods.shared.scored import Scored
from kvbench.methods.shared.view import View


@dataclass
class LagKV(Scored):
    """Keep the tokens whose keys and values vary most by the scale of the tokens behind them (arXiv:2504.04704).

    Tokens are scored in parts. In each channel the next part's smallest and largest number become 0 and 1; a token's
    score is the deviation of its channels, the softmax over its part, and then its rank there; keys and values count
    half each. The last part stays as far as there is room for it, and no attention is needed.

    Differs from the paper in: tokens leave once a segment, and what left is not among a part's numbers. A part is a
    segment (a scale, a line), or `lag` tokens. The first tokens stay only if they are asked for (`leading`, 4 in the
    program; the paper's ablation has 16).

    Attributes:
        lag: tokens of a part, 128 in the paper; None for those of a segment.
        leading: first tokens that stay.
        cross_scoring: compare softmax values of all parts instead of ranks.
    """

    lag: int | None = None
    leading: int = 0
    cross_scoring: bool = False

    limits = set_limits(leading=Limit(0), lag=Limit(2, wants="must be at least 2, or null for segments"))

    def score(self, view: View) -> Tensor:
        """Return what each token differs by, float32 [rows, slots]; 1 in parts with nothing behind them."""
        first = self.leading if view.padding is None else self.leading + view.padding[:, None]
        parts, scored = view.segment_ids, view.segment.index
        if self.lag is not None:
            parts = (view.position - first).div(self.lag, rounding_mode="floor")
            scored = (view.segment.end - self.leading) // self.lag - 1
        leads = (view.position >= 0) & (view.position < first)
        parts = parts.masked_fill(leads | (view.position < 0), -1)
        if scored < 1:
            found = view.position.float()
        else:
            found = compare_parts(
                view.cached_keys(), view.cached_values(), parts, scored, ranks=not self.cross_scoring
            )
        return found.masked_fill(leads, torch.inf)


def compare_parts(keys: Tensor, values: Tensor, parts: Tensor, scored: int, *, ranks: bool) -> Tensor:
    """Return how much tokens differ from the part behind theirs, float32 [rows, slots]; 1 where none is scored.

    Args:
        keys: [rows, slots, D].
        values: shaped like `keys`.
        parts: int64 [rows, slots], in order, -1 for slots of none.
        scored: parts before this one have a whole part behind them.
        ranks: a token's place in its part, from 0, over the part's tokens; else its softmax.
    """
    found = (_deviate(keys, parts, scored) + _deviate(values, parts, scored)) / 2
    if ranks:
        # Sorted by score, then, as sorting is stable, by part.
        order = found.sort(dim=1, stable=True).indices
        sorted_parts, by_part = parts.gather(1, order).sort(dim=1, stable=True)
        places = torch.arange(order.shape[1], device=order.device).expand_as(order)
        place = torch.empty_like(order).scatter_(1, order.gather(1, by_part), places)
        before, after = (torch.searchsorted(sorted_parts, parts, right=right) for right in (False, True))
        found = (place - before) / (after - before)
    return found.masked_fill((parts < 0) | (parts >= scored), 1)


def _deviate(x: Tensor, parts: Tensor, scored: int) -> Tensor:
    """Return the softmax over each part of the deviation of scaled channels, float32 [rows, slots]."""
    x, width = x.float(), scored + 3
    part = parts.clamp(-1, scored + 1) + 1
    index = part[..., None].expand_as(x)
    low, high = (
        x.new_full((len(x), width, x.shape[-1]), fill).scatter_reduce_(1, index, x, how)
        for fill, how in ((torch.inf, "amin"), (-torch.inf, "amax"))
    )
    behind = (index + 1).clamp(max=width - 1)
    low, high = low.gather(1, behind), high.gather(1, behind)
    spread = high - low
    known = spread.isfinite() & (
        spread > 0
    )  # others are channels of one value, or parts of which nothing is left
    deviation = torch.where(known, (x - low) / spread.where(known, 1), 0).std(-1)
    largest = deviation.new_zeros(len(x), width).scatter_reduce_(1, part, deviation, "amax")
    weight = (deviation - largest.gather(1, part)).exp().masked_fill(parts < 0, 0)
    # Slots of no part lie in the one before them and count nothing there.
    return (weight / sum_runs(weight, parts.cummax(1).values).clamp(min=1e-30)).float()
