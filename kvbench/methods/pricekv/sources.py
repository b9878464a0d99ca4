"""Sources: the past segments that a head can choose to hold while a segment, their consumer, runs."""

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvbench.core.segments import ModelSpec

Number = TypeVar("Number", np.int64, np.float64)
Sources = tuple[tuple[int, ...], ...]
"""Of every segment the earlier ones, in order. A set of them is a number whose bit j stands for the j-th one."""


def list_sources(spec: ModelSpec, recent: int) -> Sources:
    """Return the sources of each segment: all before it, or of a next-token model the first and the newest ones.

    Args:
        spec: the model.
        recent: how many newest segments of a next-token model, whose rows are too many for sets of all of them.
    """
    count = len(spec.segments)
    recent = count if spec.family == "next-scale" else recent
    return tuple(tuple(i for i in range(k) if i == 0 or i >= k - recent) for k in range(count))


def sum_sets(values: NDArray[Number]) -> NDArray[Number]:
    """Sum the values of each set: [2^n, ...] of values [n, ...].

    >>> sum_sets(np.array([1, 4, 9])).tolist()
    [0, 1, 4, 5, 9, 10, 13, 14]
    """
    sums = np.zeros((1, *values.shape[1:]), values.dtype)
    for value in values:
        sums = np.concatenate((sums, sums + value))
    return sums
