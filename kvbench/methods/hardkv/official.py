"""Selection of the released Hard-KV program where it differs from the paper.

Its sparse classes average probabilities over the queries before they take the top-p, add the best of a fixed number,
and force the first and last slots. Its rewriting classes count every slot that exists as selected (a product over the
whole mask in place of one over the queries), so that the cap alone decides, and it cuts what is latest. Temperatures
are the constant that its solver starts from; raw scores have none.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kvbench.methods.hardkv.calibration import OFFICIAL, mark_top_p
from kvbench.methods.hardkv.selectors import Selector
from kvbench.methods.shared.select import softmax_seen

SINKS = 1
"""Slots at the start of a row that the program keeps."""


def weigh_slots(
    raw: Tensor,
    alter: Callable[[Tensor], Tensor],
    selector: Selector,
    attended: Tensor,
    asking: Tensor | None = None,
    *,
    averaged: bool,
) -> Tensor:
    """Return the probabilities that the program selects by, float32 [rows, queries, slots].

    Args:
        raw: scores, float32 [rows, queries, slots], -inf where a slot is not attended.
        alter: what the selector makes of such scores.
        selector: its name.
        attended: bool [rows, slots], slots that have probabilities. On R-KV's first call the program gives all of them
            some; in its runs as in ours all slots are attended then.
        asking: bool [rows, queries], which queries a row has; None for all.
        averaged: as the sparse classes have it, one row of probabilities for all queries; R-KV then mixes redundancy
            with averaged attention.
    """
    if averaged and selector == "rkv":
        raw, asking = _average(softmax_seen(raw), asking).log(), None
    temperature = 1.0 if selector == "vanilla" else OFFICIAL
    weighed = (alter(raw) / temperature).masked_fill(~attended[:, None], -torch.inf)
    probabilities = softmax_seen(weighed)
    if averaged:
        return _average(probabilities, asking)
    return probabilities if asking is None else probabilities.masked_fill(~asking[..., None], 0)


def _average(probabilities: Tensor, asking: Tensor | None) -> Tensor:
    """Average over the queries that a row has, [rows, 1, slots]."""
    if asking is None:
        return probabilities.mean(1, keepdim=True)
    total = probabilities.masked_fill(~asking[..., None], 0).sum(1, keepdim=True)
    return total / asking.sum(1)[:, None, None].clamp(min=1)


def select_sparse(probabilities: Tensor, p: float, count: int, window: int) -> Tensor:
    """Return what stays visible, bool [rows, slots]: the top-p of the mean, the best `count`, and both ends.

    Args:
        probabilities: float32 [rows, slots], averaged over the queries.
        p: share of the mass.
        count: slots that are taken whatever their mass, from 0 to `slots`.
        window: last slots that stay.
    """
    marked = mark_top_p(probabilities, p)
    marked.scatter_(1, probabilities.topk(count).indices, value=True)
    marked[:, :SINKS] = True
    marked[:, -window:] = True
    return marked


def rank_rewritten(marked: Tensor, attended: Tensor, window: int) -> Tensor:
    """Return the place that each slot gets when a row is rewritten, int64 [rows, slots]; a cap keeps the first places.

    The first slot comes first, then the window from its newest slot on, then what was marked in order of time, then
    all others in order of time, and slots that are not attended last.

    Args:
        marked: bool [rows, slots], what any query marked.
        attended: bool [rows, slots].
        window: newest attended slots of a row.
    """
    slots = marked.shape[1]
    place = torch.arange(slots, device=marked.device).expand_as(marked)
    newer = attended.flip(1).cumsum(1).flip(1)  # how many are attended from this slot to the last
    key = torch.where(marked, 2 * slots, 3 * slots) + place
    key = torch.where(newer <= window, slots + newer, key)
    key = torch.where(place < SINKS, place, key)
    return key.masked_fill(~attended & (place >= SINKS), 5 * slots).argsort(dim=1, stable=True).argsort(dim=1)
