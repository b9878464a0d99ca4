"""Base class of methods around a scored one, which they take scores, capacities and sinks from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.config import ConfigError
from kvbench.core.segments import ModelSpec, Segment
from kvbench.methods.shared.base import Artifact, Observer
from kvbench.methods.shared.capabilities import SparseReads, is_stateful, reads_sparsely, replaces_contents
from kvbench.methods.shared.scored import Scored
from kvbench.methods.shared.select import BranchMode
from kvbench.methods.shared.view import View


@dataclass(kw_only=True)
class Wrapper(SparseReads, Scored):
    """Do what another method does, but for what a subclass overrides, such as `choose`.

    Sinks, branches, `refresh` and `ema` are those of the base.

    Attributes:
        base: the method inside, which has scores and keeps the contents of slots.

    Raises:
        ConfigError: the base is no such method.
    """

    base: Scored
    branch_mode: BranchMode = field(default="per_row", init=False)
    sinks: int = field(default=0, init=False)
    refresh: int = field(default=1, init=False)
    ema: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        """Check the base and take over its settings."""
        if not isinstance(self.base, Scored):
            found = self.base if isinstance(self.base, str | Mapping) else type(self.base).__name__
            raise ConfigError(
                f"method.base={found}: it does not score tokens; choose a method that does, as method.base=snapkv"
            )
        if replaces_contents(self.base):
            raise ConfigError(
                f"method.base: {type(self.base).__name__} merges tokens, which only the outermost method can; set its "
                "method.base.merge=none, or make it the method and this one its base"
            )
        self.branch_mode, self.sinks, self.strict = self.base.branch_mode, self.base.sinks, self.base.strict
        self.refresh, self.ema = self.base.refresh, self.base.ema

    @property
    def revision(self) -> int:  # type: ignore[override]  # of the object inside
        """That of the base."""
        return self.base.revision

    @property
    def uses_value_norms(self) -> bool:
        """Whether the base's scores contain the norm of values."""
        return self.base.uses_value_norms

    @property
    def guaranteed_share(self) -> float:
        """That of the base."""
        return self.base.guaranteed_share

    @property
    def stateful(self) -> bool:
        """Whether the base keeps a number per slot."""
        return is_stateful(self.base)

    @property
    def sparse_reads(self) -> bool:
        """Whether the base selects what a segment attends to."""
        return reads_sparsely(self.base)

    @property
    def heads_independent(self) -> bool:
        """Whether heads of the base are independent."""
        return self.base.heads_independent

    def needs(self) -> Observer | Path | None:
        """Return what the base requires."""
        return self.base.needs()

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuse own settings out of range, and what the base refuses."""
        super().check(spec, budget)
        self.base.check(spec, budget)

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Set up both methods."""
        super().prepare(spec, budget, artifact)
        self.base.prepare(spec, budget, artifact)

    def share(self, layer: int, segment: Segment) -> int | tuple[int, ...]:
        """Return what a layer's heads may hold under the base."""
        return self.base.share(layer, segment)

    def capacity(self, layer: int, segment: Segment) -> int | tuple[int, ...] | None:
        """Return what a row holds under the base."""
        return self.base.capacity(layer, segment)

    def min_capacity(self, view: View) -> int:
        """Return the capacity below which the base drops nothing."""
        return self.base.min_capacity(view)

    def select_attended(self, view: View) -> Tensor | None:
        """Select the slots that the base selects."""
        return self.base.select_attended(view) if reads_sparsely(self.base) else None

    def observe(self, view: View) -> None:
        """Update what the base keeps of slots."""
        self.base.observe(view)

    def score(self, view: View) -> Tensor:
        """Return the base's scores, [rows, slots]."""
        return self.base.score(view)

    def rate(self, view: View) -> Tensor:
        """Return the base's scores, on which branches agree."""
        return self.base.rate(view)

    def rank(self, view: View) -> Tensor:
        """Return the base's ranking, sinks first."""
        return self.base.rank(view)

    def choose(self, view: View, ranked: Tensor) -> Tensor:
        """Choose what the base would."""
        return self.base.choose(view, ranked)
