"""Sums over kernel matrices, from which means without some samples follow at little cost."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ROWS = 1024  # of a kernel matrix at a time

Kernel = Callable[[Tensor, Tensor], Tensor]
"""Values [n, m] of every pair of rows of [n, D] and [m, D]."""
Positions = NDArray[np.int64]


@dataclass(frozen=True)
class KernelSums:
    """Sums over the kernel matrix of two sets.

    Attributes:
        kernel: gives its entries.
        a: float64 [n, D].
        b: float64 [m, D].
        hollow: the diagonal does not count.
        rows: sums float64 [n].
        columns: sums float64 [m].
    """

    kernel: Kernel
    a: Tensor
    b: Tensor
    hollow: bool
    rows: Tensor
    columns: Tensor

    @classmethod
    def add_up(cls, kernel: Kernel, a: Tensor, b: Tensor, *, hollow: bool) -> "KernelSums":
        """Compute the matrix of two sets, some rows at a time, and keep its sums."""
        rows, columns = [], torch.zeros(len(b), dtype=a.dtype)
        for start in range(0, len(a), ROWS):
            block = kernel(a[start : start + ROWS], b)
            if hollow:
                block.diagonal(start).zero_()
            rows.append(block.sum(1))
            columns += block.sum(0)
        return cls(kernel, a, b, hollow, torch.cat(rows), columns)

    def mean(self) -> float:
        """Return the mean over the matrix, without its diagonal if that does not count."""
        return float(self.rows.sum()) / (len(self.a) * len(self.b) - self.hollow * len(self.a))

    def mean_without(self, rows: Positions, columns: Positions) -> float:
        """Return the mean over what is left when rows and columns are left out.

        Args:
            rows: int64 positions.
            columns: int64 positions; those of the rows, if the diagonal does not count.
        """
        block = self.kernel(self.a[rows], self.b[columns])
        if self.hollow:
            block.diagonal().zero_()
        total = self.rows.sum() - self.rows[rows].sum() - self.columns[columns].sum() + block.sum()
        kept_rows, kept_columns = len(self.a) - len(rows), len(self.b) - len(columns)
        return float(total) / (kept_rows * (kept_columns - self.hollow))
