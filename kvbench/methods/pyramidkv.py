"""PyramidKV: SnapKV's choice, with more capacity in early layers than in late ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec
from kvbench.methods.shared.base import Artifact, Limit, set_limits
from kvbench.methods.shared.scored import WindowAttention
from kvbench.methods.shared.select import fit_window, share_layer
from kvbench.methods.shared.view import View


@dataclass
class PyramidKV(WindowAttention):
    """Keep what SnapKV keeps, in rooms that shrink from the first layer to the last in equal steps.

    Every head keeps the sinks and the window; what is left of B is dealt out by layer, the last one having 1/beta of
    the mean (arXiv:2406.02069), so that all layers together fill B exactly.

    Differs from the paper in: the window is that of `snapkv`; no head has less than one token beside sinks and window
    while there is one to have, and no layer more capacity than tokens are cached, whose surplus goes to the others.

    Attributes:
        beta: by what the mean is divided for the last layer; 1 is SnapKV.
    """

    beta: float = 20

    limits = set_limits(beta=Limit(1))

    @property
    def heads_independent(self) -> bool:
        """Capacities depend on the whole model's B."""
        return False

    @property
    def even(self) -> bool:
        """No: capacities fall from layer to layer."""
        return False

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Deal the budget out by layer."""
        super().prepare(spec, budget, artifact)
        mean = Fraction(budget.tokens, spec.all_heads)
        self._window = fit_window(self.window, floor(mean))
        fixed = min(spec.leading_tokens(self.sinks) + self._window, floor(mean))
        shares = slope_layers(mean - fixed, spec.layers, self.beta, spec.cached_length - fixed)
        totals = round_shares([spec.heads * (fixed + share) for share in shares])
        self._capacities = [share_layer(total, spec.heads) for total in totals]

    def fit(self, view: View) -> int:
        """Return the tokens of the window, as many in every layer."""
        return self._window


def slope_layers(mean: Fraction, layers: int, beta: float, upper: int) -> list[Fraction]:
    """Return a capacity for every layer, falling in equal steps and `mean` on average.

    Args:
        mean: tokens a head.
        layers: how many.
        beta: the last layer has mean / beta, and at least one token of a larger mean.
        upper: what no layer exceeds; the last one then has more.

    >>> [round(float(capacity)) for capacity in slope_layers(Fraction("409.6"), 4, 20, 1024)]
    [799, 539, 280, 20]
    """
    lower = min(mean, max(mean / Fraction(beta), Fraction(1)))
    first = min(2 * mean - lower, Fraction(upper))
    step = 2 * (first - mean) / max(layers - 1, 1)
    return [first - layer * step for layer in range(layers)] if layers > 1 else [mean]


def round_shares(shares: Sequence[Fraction]) -> list[int]:
    """Round shares of a whole number so that they still have its sum: those up that have most behind the point.

    >>> round_shares([Fraction("2.6"), Fraction("1.7"), Fraction("0.7")])
    [2, 2, 1]
    """
    whole = [floor(share) for share in shares]
    missing = int(sum(shares)) - sum(whole)
    behind = sorted(range(len(shares)), key=lambda i: whole[i] - shares[i])
    return [number + (i in behind[:missing]) for i, number in enumerate(whole)]
