"""Hard-KV's logits calibration: a temperature at which altered scores are as concentrated as the raw ones.

Source: Hard-KV, section 3.2 (Problem 1, Solutions 1 and 2) and appendix D.1 (Algorithms 1 and 2). A selector alters
scores, and the softmax of what it made may have its mass in far fewer tokens, or in far more. Divided by one
temperature a head the order of tokens stays what it is (Constraint 1), and the mass of as many tokens as the raw scores
need is p.
"""

from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvbench.methods.shared.select import softmax_seen

Calibration = Literal["none", "bisection", "gradient", "official"]
"""Ways to find a head's temperature: none (1), Algorithm 2, Algorithm 1, or that of the released code.

The released solver optimises a tensor that its loss does not read, so that it always gives 0.5.
"""
OFFICIAL = 0.5
"""Temperature that released results belong to, and that Algorithm 1 starts from."""
BOUNDS = (1e-3, 1e2)
"""Temperatures that bisection looks between: pooled scores may need more than 1, and may reach no p at all."""
HALVINGS = 40
STEPS, RATE = 50, 1e-2
"""Steps of Algorithm 1 (Adam), and their size."""
CLOSE_ENOUGH = 1e-2
"""Error of the mass at which Algorithm 1 stops."""
CLAMPED = (1e-3, 10.0)
"""Temperatures that Algorithm 1 may reach."""


def mark_top_p(probabilities: Tensor, mass: float) -> Tensor:
    """Mark the fewest largest probabilities that have the mass, and all that equal the least of them.

    Args:
        probabilities: float32 [..., slots], each row with a sum of 1.
        mass: p, in (0, 1].

    Returns:
        bool [..., slots]; at least one of every row.
    """
    ordered = _order(probabilities)
    enough = ordered.cumsum(-1)[..., :-1] < mass
    threshold = ordered.gather(-1, enough.sum(-1, keepdim=True))
    return probabilities >= threshold


def _order(numbers: Tensor) -> Tensor:
    """Sort float32 [..., slots] along the slots, largest first."""
    if numbers.is_cuda:
        return numbers.sort(-1, descending=True).values
    # On a CPU torch carries places along, which takes 25 times as long as sorting numbers alone.
    return torch.from_numpy(np.sort(numbers.numpy(), -1)).flip(-1)


def solve_temperatures(
    altered: Tensor, counts: Tensor, mass: float, method: Calibration, asking: Tensor | None = None
) -> Tensor:
    """Find each row's temperature (Problem 1).

    Args:
        altered: scores that a selector made, float32 [rows, queries, slots], -inf where a row has no such slot.
        counts: int64 [rows, queries], tokens that the raw scores need for the mass.
        mass: p.
        method: how.
        asking: bool [rows, queries], which queries a row has; None for all.

    Returns:
        float32 [rows]. Where no temperature gives the mass it is the bound on that side.
    """
    rows = len(altered)
    if method in ("none", "official"):
        return altered.new_full((rows,), OFFICIAL if method == "official" else 1.0)
    ordered = _order(altered)
    asks = torch.ones_like(counts, dtype=torch.bool) if asking is None else asking
    problem = Problem(ordered, counts, mass, asks)
    return _descend(problem) if method == "gradient" else _halve(problem)


class Problem(NamedTuple):
    """Problem 1 of many heads.

    Attributes:
        ordered: altered scores in falling order, float32 [rows, queries, slots].
        counts: int64 [rows, queries], how many of them are to have the mass.
        mass: p.
        asks: bool [rows, queries], which queries a row has.
    """

    ordered: Tensor
    counts: Tensor
    mass: float
    asks: Tensor

    def find_errors(self, temperatures: Tensor) -> Tensor:
        """Return what they have more than p at temperatures [rows]: float32 [rows, queries], 0 where nobody asks."""
        # An infinite score has no derivative in the temperature: 0 x inf would make the gradient NaN.
        absent = self.ordered == -torch.inf
        finite = self.ordered.masked_fill(absent, 0) / temperatures[:, None, None]
        tempered = softmax_seen(finite.masked_fill(absent, -torch.inf))
        found = tempered.cumsum(-1).gather(-1, self.counts[..., None] - 1)[..., 0]
        return torch.where(self.asks, found - self.mass, 0)

    def average(self, errors: Tensor) -> Tensor:
        """Average errors [rows, queries] over the queries of each row, float32 [rows]."""
        return errors.sum(1) / self.asks.sum(1).clamp(min=1)


def _halve(problem: Problem) -> Tensor:
    """Bisect the logarithm of the temperature: mass falls as it rises (Algorithm 2)."""
    low, high = (problem.ordered.new_full((len(problem.ordered),), bound).log() for bound in BOUNDS)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        above = problem.average(problem.find_errors(middle.exp())) > 0
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return ((low + high) / 2).exp()


def _descend(problem: Problem) -> Tensor:
    """Follow the gradient of the root mean square error, each row by itself until it is close (Algorithm 1)."""
    with torch.inference_mode(False), torch.enable_grad():
        ordered, counts, mass, asks = problem
        problem = Problem(ordered.clone(), counts.clone(), mass, asks.clone())
        found = problem.ordered.new_full((len(problem.ordered),), OFFICIAL).requires_grad_()
        optimizer = torch.optim.Adam([found], lr=RATE)
        for _ in range(STEPS):
            errors = problem.find_errors(found)
            far = errors.detach().abs().amax(1) >= CLOSE_ENOUGH
            before = found.detach().clone()
            # A sum over rows whose gradients do not meet: Adam treats each as if it were alone.
            loss = (problem.average(errors.square()) + 1e-12).sqrt().sum()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            with torch.no_grad():
                found.copy_(torch.where(far, found.clamp(*CLAMPED), before))
    return found.detach()
