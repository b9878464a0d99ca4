"""Maximum mean discrepancy of two sets, from sums over kernel matrices: cheap without some of the samples."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvbench.eval.distribution.frechet import Features, checked

ROWS = 1024  # of a kernel matrix at a time

Kernel = Callable[[Tensor, Tensor], Tensor]
"""Values [n, m] of every pair of rows of [n, D] and [m, D]."""
Positions = NDArray[np.int64]


def make_discrepancy(
    kernel: Kernel, first: Features, second: Features, *, hollow: bool, paired: bool
) -> Callable[[Positions], float]:
    """Return a function of the positions of kept samples that gives MMD^2 (Gretton et al., JMLR 13, 2012).

    The kernel matrices are summed once. What the other samples take away follows from the sums of their rows and
    columns and the block between them.

    Args:
        kernel: gives the matrices' entries.
        first: [n, D], whose positions are kept.
        second: [m, D].
        hollow: a sample is not compared with itself, nor with its pair: the unbiased estimate.
        paired: row i of both sides is the same sample, which is left out on both.

    Raises:
        ValueError: fewer than two samples, unequal dimensions, features that are not finite, or paired sets of unequal
            size.
    """
    a, b = checked(first, second)
    if paired and len(a) != len(b):
        raise ValueError(f"paired sets have {len(a)} and {len(b)} samples")
    within_a, within_b = (_sum_kernel(kernel, side, side, hollow=hollow) for side in (a, b))
    across = _sum_kernel(kernel, a, b, hollow=hollow and paired)

    def find_discrepancy(kept: Positions) -> float:
        out = np.setdiff1d(np.arange(len(a)), kept)
        other = out if paired else out[:0]
        return within_a(out, out) + within_b(other, other) - 2 * across(out, other)

    return find_discrepancy


def _sum_kernel(
    kernel: Kernel, a: Tensor, b: Tensor, *, hollow: bool
) -> Callable[[Positions, Positions], float]:
    """Return a function that gives the mean over the matrix of two sets without some rows and columns.

    If it is `hollow`, its diagonal does not count, and rows and columns are the same positions.
    """
    parts, columns = [], torch.zeros(len(b), dtype=a.dtype)
    for start in range(0, len(a), ROWS):
        block = kernel(a[start : start + ROWS], b)
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
