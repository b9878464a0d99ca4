"""Stability of the order of heads between calibrations (HeatKV Figure 6, Appendix C)."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvbench.methods.heatkv.scores import rank_heads, scas


def rank_deviation(masses: Sequence[Tensor]) -> NDArray[np.float64]:
    """Measure how far a head's S-CAS rank moves between calibrations, by source scale.

    It is the standard deviation of the rank over calibrations, averaged over heads.

    Args:
        masses: one `mass` float64 [L, H, K, K] per calibration (`kvbench.methods.heatkv.scores`), two or more.

    Returns:
        float64 [K - 1] in ranks, of 0 to L x H - 1; deviations are taken around the head's own mean rank, divisor R.

    Raises:
        ValueError: fewer than two calibrations, or of unequal shapes.
    """
    if len(masses) < 2 or len({mass.shape for mass in masses}) > 1:
        raise ValueError("stability of ranks needs two or more calibrations of one model")
    ranks = np.stack([rank_heads(scas(mass)[..., :-1].to(torch.float64)) for mass in masses])
    return ranks.std(axis=0).mean(axis=(1, 2))
