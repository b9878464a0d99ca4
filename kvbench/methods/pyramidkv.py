"""PyramidKV: SnapKV's scores, with capacities that decrease with depth."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor
from typing import ClassVar

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec
from kvbench.methods.shared.calibration import Artifact
from kvbench.methods.shared.capacities import share_layer
from kvbench.methods.shared.limits import Limit, set_limits
from kvbench.methods.shared.scored import WindowAttention
from kvbench.methods.shared.select import count_sinks, fit_window
from kvbench.methods.shared.view import View


@dataclass
class PyramidKV(WindowAttention):
    """Score slots as SnapKV does, with capacities that decrease linearly with depth.

    Every head keeps the sinks and the window. The rest of B is distributed over layers; the last layer gets 1/beta of
    the mean (arXiv:2406.02069). All layers together fill B exactly.

    Differs from the paper in: the window is `snapkv`'s; each head gets at least one token besides sinks and window if
    the budget permits; no layer gets more than the cached tokens, and its surplus goes to the other layers.

    Attributes:
        beta: the mean divided by the last layer's share; 1 is SnapKV.
    """

    beta: float = 20

    revision: ClassVar[int] = 3  # before, capacities were for the longest prompt of texts
    limits = set_limits(beta=Limit(1))
    heads_independent = False  # capacities depend on the whole model's B
    uniform_capacity = False  # capacities decrease with depth

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Distribute the budget over layers, less to deeper layers."""
        super().prepare(spec, budget, artifact)
        mean = Fraction(budget.tokens, spec.all_heads)
        self._window = fit_window(self.window, floor(mean))
        fixed = min(count_sinks(spec, self.sinks, self.leading) + self._window, floor(mean))
        shares = slope_layers(mean - fixed, spec.layers, self.beta, spec.cached_length - fixed)
        totals = round_shares([spec.heads * (fixed + share) for share in shares])
        self._capacities = [share_layer(total, spec.heads) for total in totals]

    def fit(self, view: View) -> int:
        """Return the tokens of the window, equal in all layers."""
        return self._window


def slope_layers(mean: Fraction, layers: int, beta: float, upper: int) -> list[Fraction]:
    """Return a linearly decreasing capacity in tokens for each layer, with average `mean`.

    The last layer gets mean / beta, at least one token if the mean is larger, and more if a layer would exceed `upper`.

    >>> [round(float(capacity)) for capacity in slope_layers(Fraction("409.6"), 4, 20, 1024)]
    [799, 539, 280, 20]
    """
    lower = min(mean, max(mean / Fraction(beta), Fraction(1)))
    first = min(2 * mean - lower, Fraction(upper))
    step = 2 * (first - mean) / max(layers - 1, 1)
    return [first - layer * step for layer in range(layers)] if layers > 1 else [mean]


def round_shares(shares: Sequence[Fraction]) -> list[int]:
    """Round shares of a whole number and keep their sum: the largest fractions are rounded up.

    >>> round_shares([Fraction("2.6"), Fraction("1.7"), Fraction("0.7")])
    [2, 2, 1]
    """
    whole = [floor(share) for share in shares]
    missing = int(sum(shares)) - sum(whole)
    by_fraction = sorted(range(len(shares)), key=lambda i: whole[i] - shares[i])
    return [number + (i in by_fraction[:missing]) for i, number in enumerate(whole)]
