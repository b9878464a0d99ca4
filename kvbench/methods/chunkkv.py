"""ChunkKV: eviction of whole chunks of neighbouring tokens, by the scores of another method."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.methods.shared.grouped import average_heads, sum_runs
from kvbench.methods.shared.limits import Limit, set_limits
from kvbench.methods.shared.scored import LARGEST
from kvbench.methods.shared.select import choose_best
from kvbench.methods.shared.view import View
from kvbench.methods.shared.wrapper import Wrapper


@dataclass
class ChunkKV(Wrapper):
    """Keep the chunks of neighbouring tokens of highest mean score, the same in all heads (arXiv:2502.00299).

    The value of a chunk is the mean of the base's scores over heads and over its cached tokens. Chunks are kept until
    the next chunk does not fit, whose best tokens then fill the budget. Slots that the base never evicts come first and
    are left out of the mean. While a sequence is shorter than a chunk, heads keep what they keep under the base.

    Differs from the program in: chunks restart at each segment (a line of an image, or part of one); part of a chunk
    fills the budget; each sequence has its own chunks.

    Attributes:
        chunk: tokens of a chunk.
    """

    chunk: int = 20

    recordable: ClassVar[bool] = True
    revision: ClassVar[int] = 1  # before, protected slots counted as 0, heads of short texts kept one set
    limits = set_limits(chunk=Limit(1))
    heads_independent = False  # heads keep the same chunks

    def select_slots(self, view: View, ranked: Tensor) -> Tensor:
        """Select the best chunks, bool [rows, slots]; rows shorter than a chunk select single slots."""
        starts = torch.tensor([segment.start for segment in self.spec.segments])
        starts = starts.to(view.position.device, non_blocking=True)
        source = view.segment_ids.clamp(min=0)
        begins = starts[source]
        if view.padding is not None:
            begins = begins.maximum(view.padding[:, None])
        within = (view.position - begins).clamp(min=0) // self.chunk
        chunks = source * (max(self.spec.lengths) // self.chunk + 1) + within
        ranks = rank_chunks(ranked, view.position, chunks, view.heads, view.segment.end)
        chosen = choose_best(ranks, self.row_capacities(view))
        if view.padding is None and view.segment.end >= self.chunk:
            return chosen
        tokens = view.segment.end - (0 if view.padding is None else view.padding[:, None])
        short = torch.as_tensor(tokens < self.chunk).to(chosen.device, non_blocking=True)
        return torch.where(short, super().select_slots(view, ranked), chosen)


def rank_chunks(ranked: Tensor, position: Tensor, chunks: Tensor, heads: int, tokens: int) -> Tensor:
    """Return the rank of each slot by its chunk, float32 [rows, slots], higher for better; infinite scores stay.

    The value of a chunk is the mean score of its evictable slots in all `heads` of a sequence; a head without the token
    counts as 0.

    Args:
        ranked: scores [rows, slots]; `scored.LARGEST` or more protects a slot, -inf marks a missing slot.
        position: int64 [rows, slots], -1 in missing slots.
        chunks: int64 [rows, slots], chunk of each slot, in rising order.
        heads: rows of a sequence.
        tokens: number of tokens so far.
    """
    exists, free = position >= 0, ranked.isfinite() & (ranked < LARGEST)
    # Missing slots join the chunk before them, with weight 0.
    chunks = chunks.where(exists, -1).cummax(1).values
    mean, protected = (
        average_heads(x, position, heads, tokens).masked_fill(~exists, 0)
        for x in (ranked.float().masked_fill(~free, 0), (exists & ~free).float())
    )
    candidates = sum_runs(exists.float() - protected, chunks)  # slots of the mean, in heads
    value = sum_runs(mean, chunks) / candidates.clamp(min=1 / heads)
    order = torch.arange(ranked.shape[1], device=ranked.device).expand_as(position)
    # Stable sorts: the last key decides.
    for key in (mean.double(), -chunks.double(), value):
        order = order.gather(1, key.gather(1, order).sort(dim=1, descending=True, stable=True).indices)
    ranks = torch.empty_like(mean).scatter_(1, order, -order.new_ones(()).expand_as(order).cumsum(1).float())
    return torch.where(free, ranks, ranked.float())
