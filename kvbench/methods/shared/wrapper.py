"""Base class of methods around a scored method, from which they take scores, capacities and sinks."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Self

from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.config import ConfigError
from kvbench.core.segments import ModelSpec, Segment
from kvbench.methods.shared.calibration import Artifact, Observer
from kvbench.methods.shared.scored import Scored
from kvbench.methods.shared.select import BranchMode
from kvbench.methods.shared.uses import Uses
from kvbench.methods.shared.view import View


@dataclass(kw_only=True)
class Wrapper(Scored):
    """Do what another method does, except for what a subclass overrides, such as `select_slots`.

    Sinks, branches, `refresh` and `ema` are the base's. The base observes and scores; a subclass that updates its own
    state overrides `ranked_if_full`, because the cache does not call the wrapper's `observe`.

    Attributes:
        base: the inner method, which has scores and keeps the contents of slots.

    Raises:
        ConfigError: the base does not score tokens, or it merges them.
    """

    base: Scored
    branch_mode: BranchMode = field(default="per_row", init=False)
    sinks: int = field(default=0, init=False)
    leading: int = field(default=0, init=False)
    refresh: int = field(default=1, init=False)
    ema: float = field(default=0.0, init=False)

    revision: ClassVar[int] = 0  # revision of the wrapper's own code; the base has its own

    def __post_init__(self) -> None:
        """Check the base and take over its settings."""
        if not isinstance(self.base, Scored):
            name = self.base if isinstance(self.base, str | Mapping) else type(self.base).__name__
            raise ConfigError(
                f"method.base={name}: it does not score tokens; choose a method that does, such as method.base=snapkv"
            )
        if self.base.uses.replaces:
            raise ConfigError(
                f"method.base: {type(self.base).__name__} merges tokens, which only the outermost method can; set its "
                "method.base.merge=none, or make it the outer method"
            )
        self.branch_mode, self.strict = self.base.branch_mode, self.base.strict
        self.sinks, self.leading = self.base.sinks, self.base.leading
        self.refresh, self.ema = self.base.refresh, self.base.ema

    @property
    def uses(self) -> Uses:
        """What the base reads and changes."""
        return self.base.uses

    @property
    def graph_obstacle(self) -> str | None:
        """What prevents recording the base, or the wrapper itself."""
        return self.base.graph_obstacle or super().graph_obstacle

    @property
    def uses_value_norms(self) -> bool:
        """Whether the base's scores contain the norm of values."""
        return self.base.uses_value_norms

    @property
    def guaranteed_share(self) -> float:
        """Share of an even capacity that the base guarantees to a head."""
        return self.base.guaranteed_share

    @property
    def heads_independent(self) -> bool:
        """Whether the heads of the base are independent."""
        return self.base.heads_independent

    def needs(self) -> Observer | Path | None:
        """Return the base's calibration, its file, or None."""
        return self.base.needs()

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuse own settings out of range, and what the base refuses."""
        super().check(spec, budget)
        self.base.check(spec, budget)

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Prepare the wrapper and its base."""
        super().prepare(spec, budget, artifact)
        self.base.prepare(spec, budget, artifact)

    def adopt_plan(self, tokens: int, plan: Self) -> None:
        """Make `plan` the result of `plan_for`, and its base the result of the base's."""
        super().adopt_plan(tokens, plan)
        self.base.adopt_plan(tokens, plan.base)

    def forget_plans(self, besides: Collection[int]) -> None:
        """Drop the plans of the wrapper and its base."""
        super().forget_plans(besides)
        self.base.forget_plans(besides)

    def keep(self, view: View) -> Tensor | None:
        """Keep what a subclass selects of the base's ranking, bool [rows, slots]; None while everything fits."""
        self.list_plans(view)  # this comes before the base uses its own plans
        return super().keep(view)

    def share(self, layer: int, segment: Segment) -> int | tuple[int, ...]:
        """Return what a layer's heads may hold under the base."""
        return self.base.share(layer, segment)

    def capacity(self, layer: int, segment: Segment) -> int | tuple[int, ...] | None:
        """Return the capacity of a layer's rows under the base."""
        return self.base.capacity(layer, segment)

    def select_attended(self, view: View) -> Tensor | None:
        """Return the slots that the base attends to, bool [rows, slots]."""
        return self.base.select_attended(view)

    def compare_layers(self, views: Sequence[View]) -> None:
        """Show the views of all layers to the base."""
        self.base.compare_layers(views)

    def ranked_if_full(self, view: View) -> Tensor | None:
        """Return the base's ranking, floating-point [rows, slots]; None while everything fits."""
        return self.base.ranked_if_full(view)

    def select_slots(self, view: View, ranked: Tensor) -> Tensor:
        """Return the slots that the base would select, bool [rows, slots]."""
        return self.base.select_slots(view, ranked)
