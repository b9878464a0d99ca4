"""Selection of the released Hard-KV program where it differs from the paper.

Its sparse classes take the top-p of the probabilities averaged over queries, add a fixed number of the best slots, and
keep the first and last slots. Its rewriting classes select every valid slot (a product over the whole mask instead of
over the queries), so that only the cap decides, and it cuts the latest slots. The temperature is the initial value of
its solver; raw scores have none.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kvbench.methods.hardkv.calibration import OFFICIAL_TEMPERATURE, Selector, mark_top_p
from kvbench.methods.shared.select import softmax_seen

SINKS = 1
"""Number of first slots of a row that the program keeps."""


def weigh_slots(
    raw: Tensor,
    alter: Callable[[Tensor], Tensor],
    selector: Selector,
    attended: Tensor,
    valid_queries: Tensor | None = None,
    *,
    averaged: bool,
) -> Tensor:
    """Return the official code's selection probabilities, float32 [rows, queries, slots].

    Raw scores are float32 [rows, queries, slots]; `alter` is the selector's change of them. Only slots that are
    `attended`, bool [rows, slots], have probabilities. (On R-KV's first call the program attends to all slots; in its
    runs and ours all slots are attended then.) Valid queries are bool [rows, queries], None for all. The sparse classes
    average over queries (`averaged`); R-KV then mixes redundancy with averaged attention.
    """
    if averaged and selector == "rkv":
        raw, valid_queries = _average(softmax_seen(raw), valid_queries).log(), None
    temperature = 1.0 if selector == "vanilla" else OFFICIAL_TEMPERATURE
    scaled = (alter(raw) / temperature).masked_fill(~attended[:, None], -torch.inf)
    probabilities = softmax_seen(scaled)
    if averaged:
        return _average(probabilities, valid_queries)
    if valid_queries is None:
        return probabilities
    return probabilities.masked_fill(~valid_queries[..., None], 0)


def _average(probabilities: Tensor, valid_queries: Tensor | None) -> Tensor:
    """Average over the valid queries of each row: float32 [rows, 1, slots]."""
    if valid_queries is None:
        return probabilities.mean(1, keepdim=True)
    total = probabilities.masked_fill(~valid_queries[..., None], 0).sum(1, keepdim=True)
    return total / valid_queries.sum(1)[:, None, None].clamp(min=1)


def select_sparse(probabilities: Tensor, p: float, count: int, window: int) -> Tensor:
    """Return the visible slots, bool [rows, slots]: the top-p of the mean, the best `count`, and both ends.

    `probabilities` is float32 [rows, slots], averaged over the queries; `window` slots at the end are always visible.
    """
    marked = mark_top_p(probabilities, p)
    marked.scatter_(1, probabilities.topk(count).indices, value=True)
    marked[:, :SINKS] = True
    marked[:, -window:] = True
    return marked


def rank_rewritten(marked: Tensor, attended: Tensor, window: int) -> Tensor:
    """Return the rank of each slot in a rewritten row, int64 [rows, slots]; a cap keeps the first ranks.

    The order is: the first slot, the window (newest attended slots) from newest to oldest, slots marked by any query in
    order of time, other slots in order of time, slots that are not attended. Masks are bool [rows, slots].
    """
    slots = marked.shape[1]
    index = torch.arange(slots, device=marked.device).expand_as(marked)
    newer = attended.flip(1).cumsum(1).flip(1)  # number of attended slots from this slot to the last
    key = torch.where(marked, 2 * slots, 3 * slots) + index
    key = torch.where(newer <= window, slots + newer, key)
    key = torch.where(index < SINKS, index, key)
    return key.masked_fill(~attended & (index >= SINKS), 5 * slots).argsort(dim=1, stable=True).argsort(dim=1)
