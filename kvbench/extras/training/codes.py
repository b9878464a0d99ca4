"""Initial codebooks by k-means++."""

import torch
from torch import Tensor
from torch.nn import functional as F

MAX_VECTORS = 2**17
"""Maximum number of vectors for k-means, drawn from all."""


def find_codes(
    vectors: Tensor, count: int, rng: torch.Generator, *, sphere: bool = False, rounds: int = 10
) -> Tensor:
    """Return `count` codes of vectors float32 [n, channels] by k-means, seeded by k-means++ so that rare vectors count.

    With `sphere`, vectors and codes have unit length. Each of the rounds assigns vectors and takes means.
    """
    vectors = vectors[torch.randperm(len(vectors), generator=rng)[:MAX_VECTORS]]
    codes = vectors[:1]
    nearest = _distances(vectors, codes)[:, 0]
    for _ in range(count - 1):
        chosen = vectors[torch.multinomial(nearest.clamp(min=1e-9), 1, generator=rng)]
        codes = torch.cat((codes, chosen))
        nearest = torch.minimum(nearest, _distances(vectors, chosen)[:, 0])
    for _ in range(rounds):
        owner = torch.cat([_distances(chunk, codes).argmin(1) for chunk in vectors.split(2**14)])
        sums = torch.zeros_like(codes).index_add_(0, owner, vectors)
        owned = torch.bincount(owner, minlength=count)[:, None]
        means = F.normalize(sums, dim=1) if sphere else sums / owned.clamp(min=1)
        codes = torch.where(owned > 0, means, codes)
    return codes


def _distances(vectors: Tensor, codes: Tensor) -> Tensor:
    """Return squared distances [n, count]."""
    squares = vectors.square().sum(1, keepdim=True) + codes.square().sum(1)
    return squares - 2 * (vectors @ codes.T)
