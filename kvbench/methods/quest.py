"""Quest: a full cache; each query reads the pages of highest score bound (arXiv:2406.10774)."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import Family, ModelSpec, Segment
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.limits import Limit, set_limits
from kvbench.methods.shared.select import choose_best
from kvbench.methods.shared.uses import Uses
from kvbench.methods.shared.view import View


@dataclass
class Quest(Method):
    """Keep everything; at each generated token, each KV head attends to the newest page and the pages of highest bound.

    A page is a run of tokens. Its bound for a query is the sum over channels of the larger of q x minimum and
    q x maximum of the page's keys: no key of the page has a larger q k^T. Prompts and the first layers read everything.
    The method saves reads, not memory, so it has no budget.

    Differs from the paper in: the query heads that share a KV head read the same pages, by the maximum of their bounds.
    Bounds are recomputed at each token: reads are counted (`python -m benchmarks reads`), no time is saved.

    Attributes:
        attention_budget: tokens that a KV head attends to, in whole pages.
        page: tokens of a page.
        dense_layers: first layers that attend to everything.
        group: `max` or `mean` of the bounds of the query heads that share a KV head.
        strict: stop when the cache exceeds the run's budget.
    """

    attention_budget: int = 1024
    page: int = 16
    dense_layers: int = 2
    group: Literal["max", "mean"] = "max"
    strict: bool = False

    uses = Uses(sparse_reads=True)
    follows_budget: ClassVar[bool] = False
    families: ClassVar[tuple[Family, ...]] = ("next-token",)
    revision: ClassVar[int] = 1  # before, a text that fits was read in part if a longer one was in its batch
    limits = set_limits(attention_budget=Limit(1), page=Limit(1), dense_layers=Limit(0))

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuse an attention budget below one page, and what the base class refuses."""
        super().check(spec, budget)
        if self.attention_budget < self.page:
            raise ValueError(
                f"method.attention_budget={self.attention_budget}: must be at least a page, method.page={self.page}"
            )

    def capacity(self, layer: int, segment: Segment) -> int:
        """Return the number of tokens so far, as nothing is dropped."""
        return segment.end

    def keep(self, view: View) -> None:
        """Keep everything: return None."""
        return

    def select_attended(self, view: View) -> Tensor | None:
        """Select the pages of highest bound for the newest query, bool [rows, slots]."""
        slots = view.position.shape[1]
        if slots <= self.attention_budget or view.layer < self.dense_layers:
            return None
        newest = torch.tensor([view.segment.length - 1])
        keys, exists = view.cached_keys(), view.position >= 0
        pages = (exists.cumsum(1) - 1).clamp(min=0) // self.page
        if view.padding is not None:  # pages count the tokens of each row, which are unequal
            order = (~exists).sort(dim=1, stable=True).indices
            keys, exists = keys.gather(1, order[..., None].expand_as(keys)), exists.gather(1, order)
        bounds = bound_pages(view.queries(newest)[:, :, 0], keys, exists, self.page)
        bounds = bounds.amax(1) if self.group == "max" else bounds.mean(1)
        bounds.scatter_(1, pages[:, -1:], torch.inf)
        chosen = choose_best(bounds, self.attention_budget // self.page).gather(1, pages)
        return chosen | (exists.sum(1, keepdim=True) <= self.attention_budget)


def bound_pages(queries: Tensor, keys: Tensor, exists: Tensor, page: int) -> Tensor:
    """Return the upper bound of q k^T over the keys of each page, float32 [rows, G, pages]; -inf without keys.

    Queries are [rows, G, D], keys [rows, slots, D] in order of position; `exists` is bool [rows, slots]. A page has
    `page` slots, the last page possibly fewer.
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
