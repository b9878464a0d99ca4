"""Allocation where a block may be stored as the difference to its prediction from the scale before."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kvbench.methods.pricekv.problem import Allocation, Bools, Floats, Ints, Problem, sum_error

ROUNDS = 8
"""Largest number of allocations from each start."""


class Predictions(NamedTuple):
    """Errors of blocks that are predicted.

    Attributes:
        noise: as `Problem.noise` where the block is predicted, float64 [K - 1, F, K, T].
        shared: precisions that are stored once for both branches, bool [F].
        bits: bits of the precisions, int [F].
    """

    noise: Floats
    shared: Bools
    bits: Ints


def allocate_predicted(
    problem: Problem, predictions: Predictions, allocate: Callable[[Problem], Allocation]
) -> tuple[Allocation, Bools]:
    """Find an allocation, and the blocks that are predicted, bool [T, K - 1].

    A block may be predicted if its head holds the block of the scale before for as long. `allocate` assumes that blocks
    do not depend on each other, so each round gives it the errors that the allocation of the round before implies: the
    smaller one of a block whose scale before is held for as long, and for the scale before the error that dropping it
    earlier would add to the block. Rounds start once from no prediction and once from a prediction of every block. The
    allocation of least estimated error is returned; all are feasible, because a prediction takes no bytes.

    Args:
        problem: its noise is of blocks that are not predicted.
        predictions: errors of blocks that are.
        allocate: finds an allocation.
    """
    least = np.inf
    found: tuple[Allocation, Bools] | None = None
    for noise in (problem.noise, np.minimum(problem.noise, predictions.noise)):
        last = np.inf
        for _ in range(ROUNDS):
            allocation = allocate(replace(problem, noise=noise))
            predicted, saved = choose_predicted(problem, predictions, allocation)
            error = sum_error(problem, allocation) - float(saved[predicted].sum())
            if error < least:
                least, found = error, (allocation, predicted)
            if error >= last:
                break
            last = error
            noise = _estimate_noise(problem, predictions, allocation, np.where(predicted, saved, 0))
    assert found is not None, "errors are finite"
    return found


def choose_predicted(
    problem: Problem, predictions: Predictions, allocation: Allocation
) -> tuple[Bools, Floats]:
    """Return the blocks that are best predicted, and the error that the prediction of each block saves, [T, K - 1].

    The errors were measured with a scale before that is stored in as many bits and in each branch, so a block is
    predicted only from a scale before in at least as many bits whose branches differ.
    """
    until, precision = allocation
    sources, heads = np.arange(until.shape[1]), np.arange(len(until))[:, None]
    saved = (problem.noise - predictions.noise)[sources, precision, until, heads]
    predicted = np.zeros(until.shape, bool)
    shared, bits = predictions.shared[precision], predictions.bits[precision]
    for source in sources[1:]:
        lasts = (until[:, source] > source) & (until[:, source] <= until[:, source - 1])
        as_measured = (bits[:, source - 1] >= bits[:, source]) & (
            ~shared[:, source - 1] | predicted[:, source - 1]
        )
        predicted[:, source] = lasts & as_measured & (saved[:, source] > 0)
    return predicted, saved


def _estimate_noise(
    problem: Problem, predictions: Predictions, allocation: Allocation, saved: Floats
) -> Floats:
    """Return the noise of each block if all other blocks stay as they are; `saved` is 0 where nothing is predicted."""
    until = allocation.until
    noise, ends = problem.noise.copy(), np.arange(problem.segments)[:, None]
    for source in range(1, until.shape[1]):
        held = ends <= until[:, source - 1]  # [K, T]
        noise[source] = np.where(held, np.minimum(noise[source], predictions.noise[source]), noise[source])
        noise[source - 1] += np.where(ends < until[:, source], saved[:, source], 0)
    return noise
