"""LagKV: scores by deviation relative to the range of the tokens that follow."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.methods.shared.grouped import sum_runs
from kvbench.methods.shared.limits import Limit, set_limits
from kvbench.methods.shared.scored import Scored
from kvbench.methods.shared.select import find_leading
from kvbench.methods.shared.view import View


@dataclass
class LagKV(Scored):
    """Keep the tokens whose keys and values vary most relative to the following tokens (arXiv:2504.04704).

    Tokens are scored in chunks. Each channel is scaled such that the minimum and maximum of the next chunk become 0 and
    1. A token's score is the standard deviation over its channels, a softmax over its chunk, the mean of keys and
    values, and finally the rank within the chunk. The last chunk is kept if it fits, otherwise its newest tokens. No
    attention is needed.

    Keys are compared as they are rotated, as in the program, so scores depend on positions.

    Differs from the paper in: eviction happens once per segment, and evicted tokens do not count in the minimum and
    maximum. A chunk is a segment (a scale, a line), or `lag` tokens. The first tokens are kept only with `leading` (4
    in the program; the paper's ablation has 16).

    Attributes:
        lag: tokens of a chunk, 128 in the paper; None for segments.
        cross_scoring: compare softmax values of all chunks instead of ranks.
    """

    lag: int | None = None
    cross_scoring: bool = False

    recordable: ClassVar[bool] = True
    revision: ClassVar[int] = 2  # before, the earliest tokens of an unscored part stayed
    limits = set_limits(lag=Limit(2, wants="must be at least 2, or null for segments"))

    def score(self, view: View) -> Tensor:
        """Return the score of each token, 1 in chunks without a next chunk, newest first: float32 [rows, slots]."""
        leads = find_leading(view, self.leading)
        chunks, scored = view.segment_ids, view.segment.index
        if self.lag is not None:
            first = self.leading if view.padding is None else self.leading + view.padding[:, None]
            chunks = (view.position - first).div(self.lag, rounding_mode="floor")
            scored = (view.segment.end - self.leading) // self.lag - 1
        chunks = chunks.masked_fill(leads | (view.position < 0), -1)
        scores = view.position.float()
        if scored >= 1:
            keys, values = view.cached_keys(), view.cached_values()
            scores = compare_chunks(keys, values, chunks, scored, ranks=not self.cross_scoring)
        if self.lag is not None and view.padding is not None:  # a short prompt has fewer chunks
            scores = scores.masked_fill(chunks >= (view.segment.end - first) // self.lag - 1, 1)
        if self.spec.family == "next-token":  # tokens of a scale arrive together
            # The last part may exceed the capacity; of its equal scores the newest are kept.
            scores = torch.where(scores == 1, 1 + view.position * torch.finfo(scores.dtype).eps, scores)
        return scores.masked_fill(leads, torch.inf)


def compare_chunks(keys: Tensor, values: Tensor, chunks: Tensor, scored: int, *, ranks: bool) -> Tensor:
    """Return the scores of tokens relative to the next chunk, float32 [rows, slots]; 1 in chunks that are not scored.

    Keys and values are [rows, slots, D]; chunks, int64 [rows, slots], are in order, -1 for slots outside all chunks.
    The first `scored` chunks have a complete next chunk. With `ranks` the score is the rank in the chunk, from 0,
    divided by the chunk's tokens; otherwise it is the softmax.
    """
    scores = (_measure_deviation(keys, chunks, scored) + _measure_deviation(values, chunks, scored)) / 2
    if ranks:
        # Stable sorts give the order by chunk, then by score.
        order = scores.sort(dim=1, stable=True).indices
        sorted_chunks, by_chunk = chunks.gather(1, order).sort(dim=1, stable=True)
        indices = torch.arange(order.shape[1], device=order.device).expand_as(order)
        rank = torch.empty_like(order).scatter_(1, order.gather(1, by_chunk), indices)
        before, after = (torch.searchsorted(sorted_chunks, chunks, right=right) for right in (False, True))
        scores = (rank - before) / (after - before)
    return scores.masked_fill((chunks < 0) | (chunks >= scored), 1)


def _measure_deviation(x: Tensor, chunks: Tensor, scored: int) -> Tensor:
    """Return the softmax over each chunk of the deviation of scaled channels, float32 [rows, slots]."""
    x, width = x.float(), scored + 3
    chunk = chunks.clamp(-1, scored + 1) + 1
    index = chunk[..., None].expand_as(x)
    low, high = (
        x.new_full((len(x), width, x.shape[-1]), fill).scatter_reduce_(1, index, x, how)
        for fill, how in ((torch.inf, "amin"), (-torch.inf, "amax"))
    )
    following = (index + 1).clamp(max=width - 1)
    low, high = low.gather(1, following), high.gather(1, following)
    spread = high - low
    valid = spread.isfinite() & (spread > 0)  # False for constant channels and evicted chunks
    deviation = torch.where(valid, (x - low) / spread.where(valid, 1), 0).std(-1)
    largest = deviation.new_zeros(len(x), width).scatter_reduce_(1, chunk, deviation, "amax")
    weight = (deviation - largest.gather(1, chunk)).exp().masked_fill(chunks < 0, 0)
    # Slots outside all chunks join the chunk before them, with weight 0.
    return (weight / sum_runs(weight, chunks.cummax(1).values).clamp(min=1e-30)).float()
