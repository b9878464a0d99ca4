"""Retrieval heads, found by attention to distant tokens, and their minimum capacity."""

import numpy as np
import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec
from kvbench.methods.shared.capacities import Ints
from kvbench.methods.shared.select import choose_window
from kvbench.methods.shared.view import View

DISTANT = 128
"""Tokens between a query and the nearest token that it can retrieve."""
CONTRAST = 4
"""Factor on the mean attention of a segment's queries to a token, above which attention counts as retrieval."""


def measure_retrieval(view: View, attention: Tensor) -> Tensor:
    """Return how much heads retrieve in a segment, float64 [H] on the CPU, a sum over sequences.

    The score of a query is its attention to each token at least `DISTANT` earlier, less `CONTRAST` times the segment's
    mean attention to the token, summed where positive. It is averaged over queries and query heads. A retrieval head
    attends to different distant tokens at each query; first tokens, punctuation and a diffuse past receive equal
    attention from all queries.

    Args:
        view: a layer of a full cache, after any segment but the first.
        attention: of evenly spaced queries of the segment (`utility.attend_evenly`).
    """
    chosen = choose_window("uniform", view.segment, attention.shape[2]).to(view.position.device)
    distant = view.position[:, None] <= (view.segment.start + chosen - DISTANT)[:, None]
    above = (attention - CONTRAST * attention.mean(2, keepdim=True)).clamp(min=0) * distant[:, None]
    return above.sum(-1).mean((1, 2)).double().unflatten(0, (-1, view.heads)).sum(0).cpu()


def raise_floors(floor: int, retrieval: Tensor | None, share: float, spec: ModelSpec, budget: Budget) -> Ints:
    """Return the minimum capacity of each head, int64 [L x H]: the whole text in heads that retrieve most.

    Args:
        floor: minimum capacity of the other heads, at most B / T.
        retrieval: how much each head retrieves, float64 [L, H]; None leaves all heads their minimum.
        share: share of B for whole texts; the other heads keep their minimum.
        spec: the model.
        budget: the capacity B.
    """
    floors = np.full(spec.all_heads, floor)
    if retrieval is None:
        return floors
    whole, total = spec.cached_length, budget.tokens
    spare = (total - floor * spec.all_heads) // max(whole - floor, 1)
    count = min(int(share * total) // whole, spare)
    floors[torch.argsort(retrieval.flatten(), descending=True, stable=True)[:count].numpy()] = whole
    return floors
