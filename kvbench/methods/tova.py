"""TOVA: the tokens that the newest query attends to."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.methods.base import Limit, set_limits
from kvbench.methods.scored import Scored
from kvbench.methods.select import average_attention, choose_window, find_asking, find_slots
from kvbench.methods.view import View


@dataclass
class TOVA(Scored):
    """Keep the newest token and those that it attends to most, the same ones in all heads of a layer.

    A slot's score is the attention from the newest query, the mean over all query heads (arXiv:2401.06104).
    Heads share B evenly.

    Differs from the paper in: a step of an image has many queries, of which the last in raster order asks, and tokens
    leave once a segment instead of one at a time. The paper protects no sinks.

    Attributes:
        asking: how many of the newest queries are averaged; 1 in the paper.
    """

    asking: int = 1

    limits = set_limits(asking=Limit(1))

    @property
    def headwise(self) -> bool:
        """Heads share one score."""
        return False

    def score(self, view: View) -> Tensor:
        """Return the heads' mean attention from the newest queries, float32 [rows, slots], infinity for the newest."""
        chosen = choose_window("last", view.segment, self.asking)
        newest = find_slots(view, chosen[-1:])
        attention = average_attention(
            view.scores(chosen), newest, softmax="all", group="mean", asking=find_asking(view, chosen)
        )
        return average_heads(attention, view.position, view.heads, view.segment.end).masked_fill(
            newest, torch.inf
        )


def average_heads(scores: Tensor, position: Tensor, heads: int, tokens: int) -> Tensor:
    """Average a number per slot over the heads of each sequence, by token; a head that lost a token counts as 0 there.

    Args:
        scores: float32 [rows, slots], rows sequence-major.
        position: int64 [rows, slots], token of each slot, -1 where there is none.
        heads: rows of a sequence.
        tokens: how many there are so far.

    Returns:
        float32 [rows, slots]; numbers of slots that a row has not do not matter.
    """
    by_sequence = position.unflatten(0, (-1, heads)).flatten(1).clamp(min=0)
    given = scores.masked_fill(position < 0, 0).unflatten(0, (-1, heads)).flatten(1)
    mean = scores.new_zeros(len(given), tokens).scatter_add_(1, by_sequence, given) / heads
    return mean.gather(1, by_sequence).view_as(scores)
