"""Base class of methods that keep the newest tokens and choose among older tokens anew at every eviction."""

from dataclasses import dataclass

from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec
from kvbench.methods.shared.scored import Scored
from kvbench.methods.shared.select import find_sinks
from kvbench.methods.shared.view import View

TEXT_WINDOW = 64
"""Window of newest tokens in the papers' tables of texts."""


@dataclass(kw_only=True)
class NewestKept(Scored):
    """Keep the newest tokens, and choose among older tokens anew at every eviction; a subclass writes `score`.

    Attributes:
        window: newest tokens that are kept; None for `default_window`, at most half of the capacity without sinks.
    """

    window: int | None = None

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuse `refresh` and `ema`, because every eviction chooses anew, and what `Scored` refuses."""
        super().check(spec, budget)
        for name, value, usual in (("refresh", self.refresh, 1), ("ema", self.ema, 0)):
            if value != usual:
                raise ValueError(
                    f"method.{name}={value}: every eviction chooses anew; set method.{name}={usual}"
                )

    def count_reserved(self, spec: ModelSpec) -> int:
        """Return the tokens of the window, and one older token."""
        return (self.window or 0) + 1

    def default_window(self, view: View) -> int:
        """Return the tokens of the default window: 64 in texts, a row in next-token image models, 0 elsewhere."""
        return TEXT_WINDOW if self.spec.writes_text else self.spec.line

    def count_window(self, view: View) -> int | Tensor:
        """Return the tokens of the window, or of each row's window, int64 [rows, 1]."""
        return self.window if self.window is not None else fit_newest(self, view, self.default_window(view))


def fit_newest(method: Scored, view: View, wanted: int) -> Tensor:
    """Return the newest tokens that a row keeps, at most half of its capacity without sinks: int64 [rows, 1]."""
    free = method.row_capacities(view) - find_sinks(view, method.sinks, method.leading).sum(1)
    return (free // 2).clamp(min=0, max=wanted)[:, None]
