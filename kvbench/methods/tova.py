"""TOVA: scores by attention from the newest query."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.methods.shared.grouped import average_heads
from kvbench.methods.shared.limits import Limit, set_limits
from kvbench.methods.shared.scored import Scored
from kvbench.methods.shared.select import average_attention, choose_window, find_slots, find_valid_queries
from kvbench.methods.shared.view import View


@dataclass
class TOVA(Scored):
    """Keep the newest token and the tokens that it attends to most, the same in all heads of a layer.

    A slot's score is the attention from the newest query, averaged over all query heads (arXiv:2401.06104). Heads share
    B evenly.

    Differs from the paper in: a step of an image has many queries, of which the last in raster order scores; eviction
    happens once per segment instead of once per token. The paper protects no sinks.

    Attributes:
        asking: number of newest queries that are averaged; 1 in the paper.
    """

    asking: int = 1

    recordable: ClassVar[bool] = True
    limits = set_limits(asking=Limit(1))
    heads_independent = False  # heads share one score

    def score(self, view: View) -> Tensor:
        """Return the mean attention from the newest queries, infinity for the newest slot: float32 [rows, slots]."""
        chosen = choose_window("last", view.segment, self.asking)
        newest = find_slots(view, chosen[-1:])
        attention = average_attention(
            view.scores(chosen), newest, softmax="all", group="mean", asking=find_valid_queries(view, chosen)
        )
        scores = average_heads(attention, view.position, view.heads, view.segment.end)
        return scores.masked_fill(newest, torch.inf)
