"""H2O: heavy hitters of accumulated attention, and the most recent tokens."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.methods.shared.base import SHARE, Limit, set_limits
from kvbench.methods.shared.scored import Scored
from kvbench.methods.shared.select import choose_window, find_latest, sum_attention
from kvbench.methods.shared.view import View


@dataclass
class H2O(Scored):
    """Keep the latest tokens and those that received most attention since they were cached, half of each.

    A slot's score is the sum of the attention of every query that saw it; it stays with the slot (arXiv:2306.14048).
    Heads share B evenly.

    Differs from the paper in: a step has the t_k queries of a segment instead of one; each adds its attention. The
    paper protects no sinks.

    Attributes:
        recent: share of the capacity that the latest tokens have.
        norm: `none`, or `per_query` to divide by the number of queries that could see the token (ObservedAttention).
        observed: queries of a segment that count, evenly spaced and weighted to stand for all; null for all.
    """

    recent: float = 0.5
    norm: Literal["none", "per_query"] = "none"
    observed: int | None = None

    accumulates: ClassVar[bool] = True
    limits = set_limits(recent=SHARE, observed=Limit(1, wants="must be at least 1, or null for all"))

    def observe(self, view: View) -> None:
        """Add the segment's attention to every slot's sum."""
        queries = None if self.observed is None else choose_window("uniform", view.segment, self.observed)
        view.state += sum_attention(view, queries)

    def score(self, view: View) -> Tensor:
        """Return accumulated attention, float32 [rows, slots], infinity for the latest tokens."""
        latest = find_latest(view, self.recent, self.min_capacity(view))
        if self.norm == "none":
            return view.state.masked_fill(latest, torch.inf)
        starts, causal = torch.tensor(
            [(s.start, s.causal) for s in self.spec.segments], device=view.state.device
        ).T
        source = view.segment_ids.clamp(min=0)
        first = torch.where(
            causal[source] > 0, view.position, starts[source]
        )  # query that saw the slot first
        return (view.state / (view.segment.end - first)).masked_fill(latest, torch.inf)
