"""Hard-KV's scores: selectors that alter them, and a temperature per head that restores their concentration.

Source: Hard-KV, section 4 and appendix E (selectors), section 3.2 (Problem 1, Solutions 1 and 2) and appendix D.1
(Algorithms 1 and 2). A selector alters scores, which may concentrate or spread the mass of their softmax. Dividing by
one temperature per head keeps the order of tokens (Constraint 1); the temperature is chosen so that the number of
tokens that the raw scores need for the mass p has the mass p again.
"""

from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvbench.methods.shared.select import smooth, softmax_seen

Selector = Literal["vanilla", "snapkv", "rkv"]
EPSILON = 1e-10
"""Added before the logarithm of `weigh_redundancy`, as in the released code."""
Calibration = Literal["none", "bisection", "gradient", "official"]
"""Calibration of a head's temperature: none (1), Algorithm 2, Algorithm 1, or as in the released code.

The released solver optimises a tensor that its loss does not use, so its result is always 0.5.
"""
OFFICIAL_TEMPERATURE = 0.5
"""Temperature of the released results, and initial value of Algorithm 1."""
BISECTION_RANGE = (1e-3, 1e2)
"""Range of temperatures of Algorithm 2: pooled scores may need more than 1, and may not reach p at any temperature."""
BISECTION_STEPS = 40
"""Maximum number of bisections in Algorithm 2, which exhaust float32."""
GRADIENT_STEPS, LEARNING_RATE = 50, 1e-2
"""Maximum number of steps, and learning rate, of Algorithm 1 (Adam)."""
TOLERANCE = 1e-2
"""Error of the mass at which Algorithm 1 stops."""
GRADIENT_RANGE = (1e-3, 10.0)
"""Range of temperatures in Algorithm 1."""


def pool_scores(scores: Tensor, exists: Tensor, kernel: int) -> Tensor:
    """Give every slot the maximum score among its neighbours (SnapKV, before the softmax).

    `kernel` is the odd width of the maximum in slots. Only slots that a row has, `exists`, bool [rows, slots], are
    neighbours. Scores and result are float32 [rows, queries, slots], -inf in missing slots.
    """
    rows, queries, _ = scores.shape
    pooled = smooth(scores.flatten(0, 1), "max", kernel, exists.repeat_interleave(queries, 0))
    return pooled.unflatten(0, (rows, queries)).masked_fill(~exists[:, None], -torch.inf)


def weigh_redundancy(scores: Tensor, exists: Tensor, redundancy: Tensor, mix: float) -> Tensor:
    """Return log of lambda P - (1 - lambda) R, shifted to start at 0 and normalised (R-KV; Solution 2).

    R is `redundancy`, float32 [rows, slots] (`redundancy.measure_redundancy`), and lambda is `mix`. Scores and result
    are float32 [rows, queries, slots], -inf in missing slots; `exists` is bool [rows, slots].
    """
    mixed = mix * scores.softmax(-1) - (1 - mix) * redundancy[:, None]
    smallest = mixed.masked_fill(~exists[:, None], torch.inf).amin(-1, keepdim=True)
    shifted = (mixed - smallest).masked_fill(~exists[:, None], 0)
    weights = shifted / shifted.sum(-1, keepdim=True).clamp(min=EPSILON)
    return (weights + EPSILON).log().masked_fill(~exists[:, None], -torch.inf)


def mark_top_p(probabilities: Tensor, mass: float) -> Tensor:
    """Return a mask of the fewest largest probabilities with the mass p, and ties of the smallest: bool [..., slots].

    Probabilities are float32 [..., slots], and rows sum to 1; `mass` in (0, 1] marks at least one slot of each.
    """
    ordered = _sort(probabilities)
    enough = ordered.cumsum(-1)[..., :-1] < mass
    threshold = ordered.gather(-1, enough.sum(-1, keepdim=True))
    return probabilities >= threshold


def _sort(values: Tensor) -> Tensor:
    """Sort float32 [..., slots] along the slots, largest first."""
    if values.is_cuda:
        return values.sort(-1, descending=True).values
    # torch also sorts indices, which takes 25 times as long on a CPU.
    return torch.from_numpy(np.sort(values.numpy(), -1)).flip(-1)


def solve_temperatures(
    altered: Tensor, counts: Tensor, mass: float, method: Calibration, valid_queries: Tensor | None = None
) -> Tensor:
    """Find each row's temperature (Problem 1), float32 [rows]; the nearest bound if no temperature gives the mass p.

    Altered scores are float32 [rows, queries, slots], -inf in missing slots. `counts`, int64 [rows, queries], are the
    numbers of tokens that the raw scores need for the mass. Valid queries are bool [rows, queries], None for all.
    """
    rows = len(altered)
    if method in ("none", "official"):
        return altered.new_full((rows,), OFFICIAL_TEMPERATURE if method == "official" else 1.0)
    ordered = _sort(altered)
    if valid_queries is None:
        valid_queries = torch.ones_like(counts, dtype=torch.bool)
    problem = TemperatureProblem(ordered, counts, mass, valid_queries)
    return _descend(problem) if method == "gradient" else _bisect(problem)


class TemperatureProblem(NamedTuple):
    """Problem 1 for many heads.

    Attributes:
        ordered: altered scores in falling order, float32 [rows, queries, slots].
        counts: int64 [rows, queries], number of the first scores that should have the mass.
        mass: p.
        valid_queries: bool [rows, queries].
    """

    ordered: Tensor
    counts: Tensor
    mass: float
    valid_queries: Tensor

    def find_errors(self, temperatures: Tensor) -> Tensor:
        """Return the mass minus p at temperatures [rows]: float32 [rows, queries], 0 for invalid queries."""
        if temperatures.requires_grad:
            # The derivative of an infinite score by the temperature would be NaN.
            absent = self.ordered == -torch.inf
            finite = self.ordered.masked_fill(absent, 0) / temperatures[:, None, None]
            tempered = softmax_seen(finite.masked_fill(absent, -torch.inf))
        else:
            tempered = softmax_seen(self.ordered / temperatures[:, None, None])
        mass = tempered.cumsum(-1).gather(-1, self.counts[..., None] - 1)[..., 0]
        return torch.where(self.valid_queries, mass - self.mass, 0)

    def average(self, errors: Tensor) -> Tensor:
        """Average errors [rows, queries] over the valid queries of each row, float32 [rows]."""
        return errors.sum(1) / self.valid_queries.sum(1).clamp(min=1)


def _bisect(problem: TemperatureProblem) -> Tensor:
    """Return temperatures, float32 [rows], by bisecting their logarithm; the mass falls as they rise (Algorithm 2)."""
    low, high = (problem.ordered.new_full((len(problem.ordered),), bound).log() for bound in BISECTION_RANGE)
    for _ in range(BISECTION_STEPS):
        middle = (low + high) / 2
        above = problem.average(problem.find_errors(middle.exp())) > 0
        before, (low, high) = (low, high), (torch.where(above, middle, low), torch.where(above, high, middle))
        # On a CPU, stop when the bounds are neighbouring floats; on a GPU this test would make the host wait.
        if not low.is_cuda and torch.equal(low, before[0]) and torch.equal(high, before[1]):
            break
    return ((low + high) / 2).exp()


def _descend(problem: TemperatureProblem) -> Tensor:
    """Minimise the root mean square error of each row by gradient descent, until it is in tolerance (Algorithm 1)."""
    with torch.inference_mode(False), torch.enable_grad():
        ordered, counts, mass, valid_queries = problem
        problem = TemperatureProblem(ordered.clone(), counts.clone(), mass, valid_queries.clone())
        temperatures = problem.ordered.new_full(
            (len(problem.ordered),), OFFICIAL_TEMPERATURE
        ).requires_grad_()
        optimizer = torch.optim.Adam([temperatures], lr=LEARNING_RATE)
        for _ in range(GRADIENT_STEPS):
            errors = problem.find_errors(temperatures)
            far = errors.detach().abs().amax(1) >= TOLERANCE
            before = temperatures.detach().clone()
            # Rows are independent, so one Adam on the sum optimises each as if it were alone.
            loss = (problem.average(errors.square()) + 1e-12).sqrt().sum()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            with torch.no_grad():
                temperatures.copy_(torch.where(far, temperatures.clamp(*GRADIENT_RANGE), before))
    return temperatures.detach()
