"""Norms of keys and values as scores: Knorm, and CUR."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvbench.methods.shared.base import Limit, set_limits
from kvbench.methods.shared.grouped import sum_runs
from kvbench.methods.shared.scored import Scored
from kvbench.methods.shared.view import View

Kind = Literal["kv_product", "kv_avg", "key", "value"]


@dataclass
class KeyNorm(Scored):
    """Keep the tokens of shortest keys, an even share of B in every head (arXiv:2406.11430).

    Where a model normalises its keys all are equally long, and the earliest stay.
    """

    def score(self, view: View) -> Tensor:
        """Return minus the norm of each key, float32 [rows, slots]."""
        return -torch.linalg.vector_norm(view.cached_keys(), dim=-1, dtype=torch.float32)


@dataclass
class CUR(Scored):
    """Keep the tokens whose keys and values are longest among their neighbours (CurDKV, arXiv:2509.15038; kvpress).

    Squared norms stand for leverage scores of the matrices of keys and values.

    Differs from the program in: tokens leave once a segment, and neighbours are those in the cache by then. Its random
    projections of keys and values are left out.

    Attributes:
        kind: product or mean of both squared norms, or one of them.
        local: divide each by its sum over a block of neighbours.
        block: neighbours of a block.
        leading: first tokens that stay, 4 in the program.
    """

    kind: Kind = "kv_product"
    local: bool = True
    block: int = 16
    leading: int = 0

    limits = set_limits(block=Limit(1), leading=Limit(0))

    def score(self, view: View) -> Tensor:
        """Return squared norms, float32 [rows, slots], infinity for the first tokens."""
        exists = view.position >= 0
        found = weigh_norms(
            view.cached_keys(), view.cached_values(), exists, self.kind, self.block if self.local else 0
        )
        first = self.leading if view.padding is None else self.leading + view.padding[:, None]
        return found.masked_fill(exists & (view.position < first), torch.inf)


def weigh_norms(keys: Tensor, values: Tensor, exists: Tensor, kind: Kind, block: int) -> Tensor:
    """Return squared norms of keys and values together, float32 [rows, slots], with a sum of 1 in each row.

    Args:
        keys: [rows, slots, D], zeros where a row has no such slot.
        values: shaped like `keys`.
        exists: bool [rows, slots].
        kind: what of both.
        block: neighbours among which a norm is a share; 0 for none.
    """
    both = [x.float().square().sum(-1) for x in (keys, values)]
    if block:
        ids = (exists.cumsum(1) - 1).clamp(min=0) // block
        both = [x / sum_runs(x, ids).clamp(min=1e-30).float() for x in both]
    of_keys, of_values = both
    found = {
        "kv_product": of_keys * of_values,
        "kv_avg": (of_keys + of_values) / 2,
        "key": of_keys,
        "value": of_values,
    }[kind]
    return found / found.sum(1, keepdim=True).clamp(min=1e-30)
