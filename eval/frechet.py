"""Frechet distance between Gaussians fitted to features, in float64, without a matrix square root."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Features = NDArray[np.float32] | NDArray[np.float64]


def frechet_distance(first: Features, second: Features) -> float:
    """|m1 - m2|^2 + tr S1 + tr S2 - 2 tr (S1 S2)^1/2, unbiased covariances (Heusel et al., arXiv:1706.08500).

    With few samples the last trace is the sum of singular values of A B^T, A and B being the centred
    features over sqrt(n - 1): their squares are the non-zero eigenvalues of S1 S2. It is exact for singular
    covariances.

    Args:
        first: [n, D].
        second: [m, D].

    Returns:
        The distance, not clipped: equal sets give zero up to rounding, of either sign.

    Raises:
        ValueError: fewer than two samples, unequal dimensions, or features that are not finite.
    """
    a, b = _checked(first), _checked(second)
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"features have {a.shape[1]} and {b.shape[1]} dimensions")
    if min(len(a), len(b)) > a.shape[1]:
        return frechet_from_moments(*_moments(a), *_moments(b))
    shift = (a.mean(0) - b.mean(0)).square().sum()
    a, b = ((x - x.mean(0)) / (len(x) - 1) ** 0.5 for x in (a, b))
    cross = torch.linalg.svdvals(a @ b.T).sum()
    return float(shift + a.square().sum() + b.square().sum() - 2 * cross)


def frechet_from_moments(mean1: Tensor, cov1: Tensor, mean2: Tensor, cov2: Tensor) -> float:
    """The same from float64 means [D] and covariances [D, D], through the symmetric S1^1/2 S2 S1^1/2."""
    values, vectors = torch.linalg.eigh(cov1)
    root = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    cross = torch.linalg.eigvalsh(root @ cov2 @ root).clamp(min=0).sqrt().sum()
    return float((mean1 - mean2).square().sum() + cov1.trace() + cov2.trace() - 2 * cross)


def _moments(features: Tensor) -> tuple[Tensor, Tensor]:
    centred = features - features.mean(0)
    return features.mean(0), centred.T @ centred / (len(features) - 1)


def _checked(features: Features) -> Tensor:
    if features.ndim != 2 or len(features) < 2:
        raise ValueError(
            f"a Frechet distance needs at least two samples, got features of shape {features.shape}"
        )
    if not np.isfinite(features).all():
        row = int(np.flatnonzero(~np.isfinite(features).all(1))[0])
        raise ValueError(f"features of sample {row} are not finite")
    return torch.from_numpy(np.asarray(features, np.float64))
