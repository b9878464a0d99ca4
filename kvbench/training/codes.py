"""A codebook's start: k-means over what is to be quantised, seeded far apart."""

import torch
from torch import Tensor
from torch.nn import functional as F

ENOUGH = 2**17
"""Vectors that k-means looks at, drawn from all."""


def find_codes(
    vectors: Tensor, count: int, rng: torch.Generator, *, sphere: bool = False, rounds: int = 10
) -> Tensor:
    """Find codes by k-means, seeded far apart (k-means++), so that rare vectors have codes too.

    Args:
        vectors: float32 [n, channels]; of unit length where codes are.
        count: codes to find.
        rng: chooses the vectors and the seeds.
        sphere: codes have unit length.
        rounds: of assignment and mean.

    Returns:
        float32 [count, channels].
    """
    vectors = vectors[torch.randperm(len(vectors), generator=rng)[:ENOUGH]]
    codes = vectors[:1]
    nearest = _distances(vectors, codes)[:, 0]
    for _ in range(count - 1):
        chosen = vectors[torch.multinomial(nearest.clamp(min=1e-9), 1, generator=rng)]
        codes = torch.cat((codes, chosen))
        nearest = torch.minimum(nearest, _distances(vectors, chosen)[:, 0])
    for _ in range(rounds):
        owner = torch.cat([_distances(part, codes).argmin(1) for part in vectors.split(2**14)])
        sums = torch.zeros_like(codes).index_add_(0, owner, vectors)
        owned = torch.bincount(owner, minlength=count)[:, None]
        means = F.normalize(sums, dim=1) if sphere else sums / owned.clamp(min=1)
        codes = torch.where(owned > 0, means, codes)
    return codes


def _distances(vectors: Tensor, codes: Tensor) -> Tensor:
    """Return squared distances [n, count]."""
    squares = vectors.square().sum(1, keepdim=True) + codes.square().sum(1)
    return squares - 2 * (vectors @ codes.T)
