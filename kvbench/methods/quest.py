"""Quest: everything is kept, and each query reads the pages of keys that could matter to it (arXiv:2406.10774)."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import Family, ModelSpec, Segment
from kvbench.methods.shared.base import Limit, Method, set_limits
from kvbench.methods.shared.capabilities import SparseReads
from kvbench.methods.shared.select import choose_best
from kvbench.methods.shared.view import View


@dataclass
class Quest(SparseReads, Method):
    """Keep everything; at every drawn token each KV head attends to the pages of highest bound, and to the newest.

    A page is a run of tokens. Its bound for a query is the sum over channels of the larger of q x minimum and
    q x maximum of the page's keys: no key of the page has a larger q k^T. Prompts are read whole, as are the first
    layers. Memory is that of the full cache, so the method has no budget; what it saves is reading.

    Differs from the paper in: the query heads that share a KV head read the same pages, by the maximum of their bounds.
    Bounds are worked out anew at each token here: reads are counted (`python -m benchmarks reads`), no time is saved.

    Attributes:
        attention_budget: tokens that a KV head attends to, in whole pages.
        page: tokens of a page.
        dense_layers: first layers that attend to everything.
        group: `max` or `mean` of the bounds of the query heads that share a KV head.
        strict: stop when a run's budget is exceeded, by what is kept.
    """

    attention_budget: int = 1024
    page: int = 16
    dense_layers: int = 2
    group: Literal["max", "mean"] = "max"
    strict: bool = False

    families: ClassVar[tuple[Family, ...]] = ("next-token",)
    limits = set_limits(attention_budget=Limit(1), page=Limit(1), dense_layers=Limit(0))

    @property
    def budgeted(self) -> bool:
        """Return whether it stops when the budget is exceeded; what it keeps does not depend on it."""
        return self.strict

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuse an attention budget of less than a page."""
        super().check(spec, budget)
        if self.attention_budget < self.page:
            raise ValueError(
                f"method.attention_budget={self.attention_budget}: must be at least a page, method.page={self.page}"
            )

    def capacity(self, layer: int, segment: Segment) -> int:
        """Return the tokens so far: nothing is dropped."""
        return segment.end

    def keep(self, view: View) -> None:
        """Keep everything."""
        return

    def select_attended(self, view: View) -> Tensor | None:
        """Select the pages of highest bound for the newest query, bool [rows, slots]."""
        slots = view.position.shape[1]
        if slots <= self.attention_budget or view.layer < self.dense_layers:
            return None
        newest = torch.tensor([view.segment.length - 1])
        keys, exists = view.cached_keys(), view.position >= 0
        place = exists.cumsum(1) - 1
        packed = exists
        if view.padding is not None:  # rows of unequal length have pages of their own tokens
            order = (~exists).sort(dim=1, stable=True).indices
            keys, packed = keys.gather(1, order[..., None].expand_as(keys)), exists.gather(1, order)
        bounds = bound_pages(view.queries(newest)[:, :, 0], keys, packed, self.page)
        bounds = bounds.amax(1) if self.group == "max" else bounds.mean(1)
        page_of = place.clamp(min=0) // self.page
        bounds.scatter_(1, page_of[:, -1:], torch.inf)
        return choose_best(bounds, self.attention_budget // self.page).gather(1, page_of)


def bound_pages(queries: Tensor, keys: Tensor, exists: Tensor, page: int) -> Tensor:
    """Return the largest q k^T that a key within the extremes of a page's keys can have, float32 [rows, G, pages].

    It is -inf for a page without keys.

    Args:
        queries: [rows, G, D].
        keys: [rows, slots, D], in order of position.
        exists: bool [rows, slots], which slots a row has.
        page: slots of a page; the last one may be shorter.
    """
    missing = -keys.shape[1] % page
    exists = torch.nn.functional.pad(exists, (0, missing))
    keys = torch.nn.functional.pad(keys.float(), (0, 0, 0, missing))
    absent = ~exists.unflatten(1, (-1, page))[..., None]
    paged, empty = keys.unflatten(1, (-1, page)), absent.all(2)
    high = paged.masked_fill(absent, -torch.inf).amax(2).masked_fill(empty, 0)
    low = paged.masked_fill(absent, torch.inf).amin(2).masked_fill(empty, 0)
    bounds = queries.clamp(min=0) @ high.mT + queries.clamp(max=0) @ low.mT
    return bounds.masked_fill(empty.mT, -torch.inf)
