"""Maximum mean discrepancy from sums over kernel matrices, so that leaving out samples is cheap."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from kvbench.eval.distribution.frechet import Features, Positions, check_features

CHUNK_ROWS = 1024  # rows of a kernel matrix computed at once

Kernel = Callable[[Tensor, Tensor], Tensor]
"""Function from [n, D] and [m, D] to the values [n, m] of all pairs of rows."""


def make_discrepancy(
    kernel: Kernel, first: Features, second: Features, *, hollow: bool, paired: bool
) -> Callable[[Positions], float]:
    """Return a function from the positions of kept samples to MMD^2 (Gretton et al., JMLR 13, 2012).

    The kernel matrices are summed once. Left-out samples are subtracted through the sums of their rows and columns and
    the block between them.

    Args:
        kernel: kernel function.
        first: [n, D]; the positions refer to its rows.
        second: [m, D].
        hollow: exclude pairs of a sample with itself, also across paired sides, for the unbiased estimate.
        paired: row i of both sides is the same sample, which is left out on both.

    Raises:
        ValueError: fewer than two samples, unequal dimensions, non-finite features, or paired sets of unequal size.
    """
    a, b = check_features(first, second, paired=paired)
    within_a, within_b = (_sum_kernel(kernel, side, side, hollow=hollow) for side in (a, b))
    across = _sum_kernel(kernel, a, b, hollow=hollow and paired)

    def find_discrepancy(positions: Positions) -> float:
        out = np.setdiff1d(np.arange(len(a)), positions)
        other = out if paired else out[:0]
        return within_a(out, out) + within_b(other, other) - 2 * across(out, other)

    return find_discrepancy


def _sum_kernel(
    kernel: Kernel, a: Tensor, b: Tensor, *, hollow: bool
) -> Callable[[Positions, Positions], float]:
    """Return a function from left-out rows and columns to the mean over the rest of the kernel matrix.

    With `hollow` the diagonal does not count, and the left-out rows and columns must be the same.
    """
    parts, columns = [], torch.zeros(len(b), dtype=a.dtype)
    for start in range(0, len(a), CHUNK_ROWS):
        block = kernel(a[start : start + CHUNK_ROWS], b)
        if hollow:
            block.diagonal(start).zero_()
        parts.append(block.sum(1))
        columns += block.sum(0)
    rows = torch.cat(parts)

    def mean_without(out_rows: Positions, out_columns: Positions) -> float:
        block = kernel(a[out_rows], b[out_columns])
        if hollow:
            block.diagonal().zero_()
        total = rows.sum() - rows[out_rows].sum() - columns[out_columns].sum() + block.sum()
        return float(total) / ((len(a) - len(out_rows)) * (len(b) - len(out_columns) - hollow))

    return mean_without
