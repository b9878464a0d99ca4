"""Knorm and CUR: scores by the norms of keys and values."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.methods.shared.base import ADDED, Limit, set_limits
from kvbench.methods.shared.grouped import sum_runs
from kvbench.methods.shared.scored import Scored
from kvbench.methods.shared.select import find_leading
from kvbench.methods.shared.view import View

Kind = Literal["kv_product", "kv_avg", "key", "value"]


@dataclass
class KeyNorm(Scored):
    """Keep the tokens whose keys have the smallest norm, an even share of B in every head (arXiv:2406.11430).

    If a model normalises its keys, all norms are equal and the earliest tokens stay.
    """

    recordable: ClassVar[bool] = True

    def score(self, view: View) -> Tensor:
        """Return the negative norm of each key, float32 [rows, slots]."""
        return -torch.linalg.vector_norm(view.cached_keys(), dim=-1, dtype=torch.float32)


@dataclass
class CUR(Scored):
    """Keep the tokens of largest key and value norms among their neighbours (CurDKV, arXiv:2509.15038; kvpress).

    Squared norms approximate the leverage scores of the matrices of keys and values.

    Differs from the program in: eviction happens once per segment, and neighbours are cached tokens. The random
    projections of keys and values are left out.

    Attributes:
        kind: product or mean of both squared norms, or one of them.
        local: divide each by its sum over a block of neighbours.
        block: neighbours of a block.
    """

    kind: Kind = "kv_product"
    local: bool = True
    block: int = 16

    recordable: ClassVar[bool] = True
    added: ClassVar[Mapping[str, object]] = ADDED  # `leading` is as old as the method
    limits = set_limits(block=Limit(1))

    def score(self, view: View) -> Tensor:
        """Return squared norms, infinity for the first tokens: float32 [rows, slots]."""
        block = self.block if self.local else 0
        keys, values = view.cached_keys(), view.cached_values()
        norms = weigh_norms(keys, values, view.position >= 0, self.kind, block)
        return norms.masked_fill(find_leading(view, self.leading), torch.inf)


def weigh_norms(keys: Tensor, values: Tensor, exists: Tensor, kind: Kind, block: int) -> Tensor:
    """Return combined squared norms of keys and values, float32 [rows, slots], with sum 1 in each row.

    Args:
        keys: [rows, slots, D], zeros where a row has no such slot.
        values: shaped like `keys`.
        exists: bool [rows, slots].
        kind: see `CUR`.
        block: neighbours over which norms are normalised; 0 for none.
    """
    key, value = (x.float().square().sum(-1) for x in (keys, values))
    if block:
        ids = (exists.cumsum(1) - 1).clamp(min=0) // block
        key, value = (x / sum_runs(x, ids).clamp(min=1e-30).float() for x in (key, value))
    norms = {"kv_product": key * value, "kv_avg": (key + value) / 2, "key": key, "value": value}[kind]
    return norms / norms.sum(1, keepdim=True).clamp(min=1e-30)
