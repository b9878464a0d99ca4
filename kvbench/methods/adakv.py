"""AdaKV: SnapKV's choice, with the heads of a layer competing for its capacity."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.core.segments import Segment
from kvbench.methods.base import SHARE, set_limits
from kvbench.methods.scored import Attentive
from kvbench.methods.select import choose_best, spread_capacity
from kvbench.methods.view import View


@dataclass
class AdaKV(Attentive):
    """Keep what SnapKV would, but let the heads of each layer and sequence compete for the layer's even share of B.

    A layer's best slots stay, whichever head they are of: a head whose attention is spread keeps more than one that
    attends to few (arXiv:2407.11550). Every head is sure of the best slots of a share of its capacity.

    Differs from the paper in: the window is that of `snapkv`, and the sinks stay.

    Attributes:
        safeguard: share of an even capacity that every head fills with its own best slots, alpha of the paper.
    """

    safeguard: float = 0.2

    limits = set_limits(safeguard=SHARE)

    @property
    def headwise(self) -> bool:
        """The heads of a layer compete."""
        return False

    def capacity(self, layer: int, segment: Segment) -> None:
        """Return None: the data decides how long a row is."""
        return

    def valid_slots(self, view: View) -> Tensor:
        """Return which slots every row has, bool [rows, slots]."""
        return view.position >= 0

    def rate(self, view: View) -> Tensor:
        """Return what `Scored` does, without an infinity for the window: sinks come before it, heads compete for it."""
        return super().rate(view).clamp(max=torch.finfo(torch.float32).max)

    def choose(self, view: View, ranked: Tensor) -> Tensor:
        """Choose the sinks, and the best slots of the layer."""
        capacity = spread_capacity(self.share(view.layer, view.segment), view)
        return choose_among_heads(ranked, capacity, view.heads, self.safeguard)


def choose_among_heads(scores: Tensor, capacity: int | Tensor, heads: int, safeguard: float) -> Tensor:
    """Choose the highest-scored slots of each sequence's heads together; returns bool [rows, slots].

    Args:
        scores: float32 [rows, slots], rows sequence-major; infinity is chosen first, -inf never.
        capacity: even capacity of a head, one number or int64 [rows].
        heads: rows of a sequence.
        safeguard: share of the capacity that each head is sure to fill, with its own best slots.
    """
    capacities = (
        capacity
        if isinstance(capacity, Tensor)
        else torch.full((len(scores),), capacity, device=scores.device)
    )
    safe = choose_best(scores, (safeguard * capacities.double()).long()) & (scores > -torch.inf)
    # A head's own best come before whatever else competes, and after what never leaves.
    ranked = scores.masked_fill(safe & (scores < torch.inf), torch.finfo(scores.dtype).max)
    together = ranked.unflatten(0, (-1, heads)).flatten(1)
    chosen = choose_best(together, capacities.unflatten(0, (-1, heads)).sum(1))
    return chosen.view_as(scores) & (scores > -torch.inf)
