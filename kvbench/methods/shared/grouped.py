"""Choices, means and sums of slots over the heads of a sequence, or over neighbours."""

import torch
from torch import Tensor

from kvbench.methods.shared.select import choose_best


def choose_among_heads(scores: Tensor, capacity: int | Tensor, heads: int, safeguard: float) -> Tensor:
    """Return the highest-scored slots among all heads of each sequence, bool [rows, slots].

    Of scores, float32 [rows, slots], rows sequence-major, infinity is chosen first and -inf never. The even capacity of
    a head is one number or int64 [rows]; a sequence has `heads` rows. For the safeguard see `count_safe`.
    """
    if not isinstance(capacity, Tensor):
        capacity = torch.full((len(scores),), capacity, device=scores.device)
    safe = choose_best(scores, count_safe(safeguard, capacity)) & (scores > -torch.inf)
    # A head's own best slots rank above competing slots and below slots that never leave.
    ranked = scores.masked_fill(safe & (scores < torch.inf), torch.finfo(scores.dtype).max)
    together = ranked.unflatten(0, (-1, heads)).flatten(1)
    chosen = choose_best(together, capacity.unflatten(0, (-1, heads)).sum(1))
    return chosen.view_as(scores) & (scores > -torch.inf)


def count_safe(safeguard: float, capacities: Tensor) -> Tensor:
    """Return the number of its own best slots that each head keeps, int64 [rows].

    It is a share (`safeguard`) of its even capacity, int64 [rows]; a share above 0 is at least one slot.
    """
    safe = (safeguard * capacities.double()).long()
    return torch.maximum(safe, capacities.clamp(max=1)) if safeguard > 0 else safe


def average_heads(scores: Tensor, position: Tensor, heads: int, tokens: int) -> Tensor:
    """Average a number per slot over the heads of each sequence, by token; a head without the token counts as 0.

    Scores are float32 [rows, slots], rows sequence-major, of `tokens` tokens so far; the token of each slot, int64
    [rows, slots], is -1 where there is none. The result, shaped like the scores, is arbitrary for slots that a row does
    not have.
    """
    by_sequence = position.unflatten(0, (-1, heads)).flatten(1).clamp(min=0)
    given = scores.masked_fill(position < 0, 0).unflatten(0, (-1, heads)).flatten(1)
    mean = scores.new_zeros(len(given), tokens).scatter_add_(1, by_sequence, given) / heads
    return mean.gather(1, by_sequence).view_as(scores)


def sum_runs(x: Tensor, ids: Tensor) -> Tensor:
    """Return for each slot the sum of x [rows, slots] over its neighbours of equal id, float64 [rows, slots].

    The ids are int64 [rows, slots]. No scatter: the result of atomic additions depends on their order.
    """
    place = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    ends = begins.roll(-1, 1)
    ends[:, -1] = True
    first = place.where(begins, 0).cummax(1).values
    last = place.where(ends, ids.shape[1]).flip(1).cummin(1).values.flip(1)
    total = x.double().cumsum(1)
    return total.gather(1, last) - total.gather(1, first) + x.double().gather(1, first)
