"""H2O: heavy hitters of accumulated attention, and the most recent tokens."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.methods.shared.limits import SHARE, Limit, set_limits
from kvbench.methods.shared.scored import Scored
from kvbench.methods.shared.select import choose_window, find_latest, sum_attention
from kvbench.methods.shared.view import View


@dataclass
class H2O(Scored):
    """Keep the latest tokens and the tokens with most attention since they were cached, half of each.

    The score of a slot is the attention that it received, summed over all queries so far (arXiv:2306.14048). Heads
    share B evenly.

    Differs from the paper in: a step has the t_k queries of a segment instead of one; each adds its attention. The
    paper protects no sinks.

    Attributes:
        recent: share of the capacity for the latest tokens.
        norm: `none`, or `per_query` to divide by the number of queries that could see the token (ObservedAttention).
        observed: evenly spaced queries of a segment that represent all; null for all.
    """

    recent: float = 0.5
    norm: Literal["none", "per_query"] = "none"
    observed: int | None = None

    recordable: ClassVar[bool] = True
    own_state: ClassVar[int] = 1
    limits = set_limits(recent=SHARE, observed=Limit(1, wants="must be at least 1, or null for all"))

    def observe(self, view: View) -> None:
        """Add the attention that slots receive from the segment to their sums."""
        queries = None if self.observed is None else choose_window("uniform", view.segment, self.observed)
        view.state += sum_attention(view, queries)

    def score(self, view: View) -> Tensor:
        """Return accumulated attention, float32 [rows, slots], infinity for the latest tokens."""
        latest = find_latest(view, self.recent, self.list_min_capacities(view))
        if self.norm == "none":
            return view.state.masked_fill(latest, torch.inf)
        segments = [(segment.start, segment.causal) for segment in self.spec.segments]
        starts, causal = torch.tensor(segments).to(view.state.device, non_blocking=True).T
        source = view.segment_ids.clamp(min=0)
        # Position of the first query that saw the slot.
        first = torch.where(causal[source] > 0, view.position, starts[source])
        return (view.state / (view.segment.end - first)).masked_fill(latest, torch.inf)
