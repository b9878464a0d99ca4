"""Frechet distance between Gaussians fitted to features, in float64, without a matrix square root."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Features = NDArray[np.float32] | NDArray[np.float64]
Positions = NDArray[np.int64]


def frechet_distance(first: Features, second: Features) -> float:
    """Return |m1 - m2|^2 + tr S1 + tr S2 - 2 tr (S1 S2)^1/2 of two sets (Heusel et al., arXiv:1706.08500).

    m and S are the means and unbiased covariances of the sets [n, D] and [m, D]. Equal sets give zero up to rounding.

    With few samples the last trace is the sum of singular values of A B^T, where A and B are the centred features over
    sqrt(n - 1): their squares are the non-zero eigenvalues of S1 S2. This is exact for singular covariances.

    Raises:
        ValueError: fewer than two samples, unequal dimensions, or features that are not finite.
    """
    a, b = check_features(first, second)
    if min(len(a), len(b)) > a.shape[1]:
        return frechet_to(*moments(first))(second)
    shift = (a.mean(0) - b.mean(0)).square().sum()
    a, b = ((x - x.mean(0)) / (len(x) - 1) ** 0.5 for x in (a, b))
    cross = torch.linalg.svdvals(a @ b.T).sum()
    return float(shift + a.square().sum() + b.square().sum() - 2 * cross)


def frechet_to(mean: Tensor, covariance: Tensor) -> Callable[[Features], float]:
    """Return a function from features [n, D] to their Frechet distance to a Gaussian; it raises as `frechet_distance`.

    The square root R of the Gaussian's covariance is computed once. The last trace is the sum of square roots of the
    eigenvalues of R S R, where S is the covariance of the features. With few samples it is the sum of singular
    values of A R (see `frechet_distance`), which is exact for a singular S.

    Args:
        mean: float64 [D].
        covariance: float64 [D, D].
    """
    values, vectors = torch.linalg.eigh(covariance)
    root, variance = (vectors * values.clamp(min=0).sqrt()) @ vectors.T, covariance.trace()

    def distance(features: Features) -> float:
        [data] = check_features(features)
        if data.shape[1] != len(mean):
            raise ValueError(f"features have {data.shape[1]} and {len(mean)} dimensions")
        centre, count = data.mean(0), len(data)
        scaled = (data - centre) / (count - 1) ** 0.5
        if count <= len(mean):
            cross = torch.linalg.svdvals(scaled @ root).sum()
        else:
            cross = torch.linalg.eigvalsh(root @ (scaled.T @ scaled) @ root).clamp(min=0).sqrt().sum()
        return float((centre - mean).square().sum() + scaled.square().sum() + variance - 2 * cross)

    return distance


def moments(features: Features) -> tuple[Tensor, Tensor]:
    """Return mean [D] and unbiased covariance [D, D], float64, of features [n, D].

    Raises:
        ValueError: fewer than two samples, or features that are not finite.
    """
    [data] = check_features(features)
    centred = data - data.mean(0)
    return data.mean(0), centred.T @ centred / (len(data) - 1)


def check_features(*sets: Features, min_samples: int = 2, paired: bool = False) -> list[Tensor]:
    """Check sets of features [n, D] and return them as float64 tensors.

    Raises:
        ValueError: fewer than `min_samples` samples, unequal dimensions, features that are not finite, or `paired` sets
            of unequal size.
    """
    for features in sets:
        if features.ndim != 2 or len(features) < min_samples:
            raise ValueError(f"at least {min_samples} samples are needed, got features {features.shape}")
        if not np.isfinite(features).all():
            row = int(np.flatnonzero(~np.isfinite(features).all(1))[0])
            raise ValueError(f"features of sample {row} are not finite")
    if len({features.shape[1] for features in sets}) > 1:
        raise ValueError(
            f"features have {' and '.join(str(f.shape[1]) for f in sets)} dimensions, not the same"
        )
    if paired and len({len(features) for features in sets}) > 1:
        raise ValueError(f"paired sets have {' and '.join(str(len(f)) for f in sets)} samples")
    return [torch.from_numpy(np.asarray(features, np.float64)) for features in sets]
