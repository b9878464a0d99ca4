"""Choices, means and sums of slots over the heads of a sequence, or over neighbours."""

import torch
from torch import Tensor

from kvbench.methods.shared.select import choose_best


def choose_among_heads(scores: Tensor, capacity: int | Tensor, heads: int, safeguard: float) -> Tensor:
    """Return the highest-scored slots among all heads of each sequence, bool [rows, slots].

    Scores are float32 [rows, slots], rows sequence-major, `heads` per sequence; infinity is chosen first, -inf never.
    `capacity` is the even capacity of a head, an int or int64 [rows]. For the safeguard see `count_safe`.
    """
    if not isinstance(capacity, Tensor):
        capacity = torch.full((len(scores),), capacity, device=scores.device)
    safe = choose_best(scores, count_safe(safeguard, capacity)) & (scores > -torch.inf)
    # A head's own best slots rank above competing slots and below slots that are never evicted.
    ranked = scores.masked_fill(safe & (scores < torch.inf), torch.finfo(scores.dtype).max)
    together = ranked.unflatten(0, (-1, heads)).flatten(1)
    chosen = choose_best(together, capacity.unflatten(0, (-1, heads)).sum(1))
    return chosen.view_as(scores) & (scores > -torch.inf)


def count_safe(safeguard: float, capacities: Tensor) -> Tensor:
    """Return how many of its best slots each head keeps in any case, int64 [rows].

    It is the share `safeguard` of the head's even capacity, int64 [rows]; a share above 0 is at least one slot.
    """
    safe = (safeguard * capacities.double()).long()
    return torch.maximum(safe, capacities.clamp(max=1)) if safeguard > 0 else safe


def average_heads(scores: Tensor, position: Tensor, heads: int, tokens: int) -> Tensor:
    """Average scores over the heads of each sequence, by token; a head without the token counts as 0.

    Scores are float32 [rows, slots], rows sequence-major. `position`, int64 [rows, slots], is each slot's token, -1
    where a row lacks the slot; `tokens` is their number so far. The result is float32 [rows, slots], arbitrary where a
    row lacks the slot.
    """
    by_sequence = position.unflatten(0, (-1, heads)).flatten(1).clamp(min=0)
    given = scores.masked_fill(position < 0, 0).unflatten(0, (-1, heads)).flatten(1)
    mean = scores.new_zeros(len(given), tokens).scatter_add_(1, by_sequence, given) / heads
    return mean.gather(1, by_sequence).view_as(scores)


def sum_runs(x: Tensor, ids: Tensor) -> Tensor:
    """Return for each slot the sum of x [rows, slots] over its neighbours of equal id, float64 [rows, slots].

    The ids are int64 [rows, slots]. No scatter: the result of atomic additions depends on their order.
    """
    index = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    ends = begins.roll(-1, 1)
    ends[:, -1] = True
    first = index.where(begins, 0).cummax(1).values
    last = index.where(ends, ids.shape[1]).flip(1).cummin(1).values.flip(1)
    total = x.double().cumsum(1)
    return total.gather(1, last) - total.gather(1, first) + x.double().gather(1, first)
