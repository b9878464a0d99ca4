"""ChunkKV: whole chunks of neighbours stay or leave, by the scores of another method."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.methods.shared.base import Limit, set_limits
from kvbench.methods.shared.grouped import average_heads, sum_runs
from kvbench.methods.shared.select import choose_best, spread_capacity
from kvbench.methods.shared.view import View
from kvbench.methods.shared.wrapper import Wrapper


@dataclass
class ChunkKV(Wrapper):
    """Keep the chunks of neighbouring tokens of highest mean score, the same in all heads (arXiv:2502.00299).

    A chunk's value is the mean of the base's scores over heads and over those of its tokens that are cached. Chunks are
    taken until the next one does not fit, and of that the best tokens. What the base never drops stays first.

    Differs from the program in: chunks begin anew with every segment (an image's line, with `chunk` its length, or part
    of one); the rest of a chunk fills the budget; each sequence has its own chunks.

    Attributes:
        chunk: tokens of a chunk.
    """

    chunk: int = 20

    limits = set_limits(chunk=Limit(1))

    @property
    def heads_independent(self) -> bool:
        """Heads keep the same chunks."""
        return False

    def choose(self, view: View, ranked: Tensor) -> Tensor:
        """Choose the best chunks."""
        starts = torch.tensor([segment.start for segment in self.spec.segments]).to(view.position.device)
        source = view.segment_ids.clamp(min=0)
        within = (view.position - starts[source]).clamp(min=0) // self.chunk
        chunks = source * (max(self.spec.lengths) // self.chunk + 1) + within
        ranks = rank_chunks(ranked, view.position, chunks, view.heads, view.segment.end)
        return choose_best(ranks, spread_capacity(self.share(view.layer, view.segment), view))


def rank_chunks(ranked: Tensor, position: Tensor, chunks: Tensor, heads: int, tokens: int) -> Tensor:
    """Return how late each slot leaves, float32 [rows, slots]: slots of the best chunk last, infinite ones never.

    Args:
        ranked: [rows, slots], scores; -inf where a row has no such slot.
        position: int64 [rows, slots], -1 there.
        chunks: int64 [rows, slots], chunk of each slot, in order.
        heads: rows of a sequence.
        tokens: how many there are so far.
    """
    exists, finite = position >= 0, ranked.isfinite()
    # Slots that a row has not lie in the chunk before them and count nothing there.
    chunks = chunks.where(exists, -1).cummax(1).values
    mean = average_heads(ranked.float().masked_fill(~finite, 0), position, heads, tokens).masked_fill(
        ~exists, 0
    )
    value = sum_runs(mean, chunks) / sum_runs(exists.float(), chunks).clamp(min=1)
    order = torch.arange(ranked.shape[1], device=ranked.device).expand_as(position)
    # Sorting is stable: by the last key first.
    for key in (mean.double(), -chunks.double(), value):
        order = order.gather(1, key.gather(1, order).sort(dim=1, descending=True, stable=True).indices)
    ranks = torch.empty_like(mean).scatter_(1, order, -order.new_ones(()).expand_as(order).cumsum(1).float())
    return torch.where(finite, ranks, ranked.float())
