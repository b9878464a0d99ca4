"""Even shares of a number of tokens among layers and heads."""

import torch
from torch import Tensor

from kvbench.core.segments import ModelSpec


def share_evenly(tokens: int, spec: ModelSpec) -> list[int | tuple[int, ...]]:
    """Share whole tokens evenly among all heads; the first heads, layer by layer, get one more for the remainder.

    Args:
        tokens: tokens that a sequence may hold, at most the full cache.
        spec: the model's shapes.

    Returns:
        Capacity of each layer: one number if its heads are equal, otherwise one for each head.
    """
    even, more = divmod(tokens, spec.all_heads)
    extra = (min(max(more - layer * spec.heads, 0), spec.heads) for layer in range(spec.layers))
    return [share_layer(spec.heads * even + one, spec.heads) for one in extra]


def share_by_head(tokens: int, spec: ModelSpec) -> Tensor:
    """Return the capacity of each head by `share_evenly`, int64 [L, H]."""
    return torch.stack([torch.tensor(capacity).expand(spec.heads) for capacity in share_evenly(tokens, spec)])


def share_layer(tokens: int, heads: int) -> int | tuple[int, ...]:
    """Share a layer's tokens among its heads; the first heads get one more for the remainder.

    >>> share_layer(12, 4), share_layer(14, 4)
    (3, (4, 4, 3, 3))
    """
    even, more = divmod(tokens, heads)
    return (*(even + 1,) * more, *(even,) * (heads - more)) if more else even
