"""Calibrations with another method's scores on full caches, and the base of methods that price capacities by them."""

from copy import deepcopy
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.config import ConfigError
from kvbench.core.segments import ModelSpec
from kvbench.methods.shared.calibration import Artifact, Observer, require_artifact
from kvbench.methods.shared.capacities import Ints
from kvbench.methods.shared.scored import Scored
from kvbench.methods.shared.select import count_sinks
from kvbench.methods.shared.uses import Uses
from kvbench.methods.shared.view import View
from kvbench.methods.shared.wrapper import Wrapper

CAPACITY_COUNT = 18
"""Maximum number of capacities above 0 at which errors are measured: a geometric sequence from 1/128 of all tokens to
all tokens."""


@dataclass
class FullScores(Observer):
    """Scores of another method on full caches, with the same capacity for all heads; a subclass writes `measure`.

    If the base has a calibration, a first pass makes it, and its tensors are added to the artifact.

    Attributes:
        base: the method that scores.
        queries: number of evenly spaced queries of each segment.
    """

    base: Scored
    queries: int = 64

    def measure(self, view: View) -> None:
        """Add the statistics of one layer after a segment; the state of slots is current."""
        raise NotImplementedError

    def own_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors that `measure` makes."""
        raise NotImplementedError

    def tensor_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the base's calibration and of the own tensors."""
        needs = self.base.needs()
        of_base = needs.tensor_shapes(spec) if isinstance(needs, Observer) else {}
        return {**of_base, **self.own_shapes(spec)}

    @property
    def uses(self) -> Uses:
        """What the base's calibration reads."""
        needs = self.base.needs()
        return needs.uses if isinstance(needs, Observer) else Uses()

    def prepare(self, spec: ModelSpec) -> None:
        """Set the sums to zero, and start the base's calibration if it has one."""
        super().prepare(spec)
        self._capacities = list_capacities(spec)
        self._bases: list[Scored] = []
        self._states: dict[int, Tensor] = {}
        needs = self.base.needs()
        self._observer = needs if isinstance(needs, Observer) else None
        if self._observer is None:
            self._prepare_bases(None)
        else:
            self._observer.prepare(spec)

    def accumulate(self, view: View) -> None:
        """Run the base's calibration; in the last pass, update the state of slots and measure."""
        if not self._bases and self._observer is not None:
            self._observer.observe(view)
            return
        if self.base.uses.state and not view.segment.last:
            self._update_state(view)
        self.measure(view)

    def needs_another_pass(self) -> bool:
        """Return whether the base's calibration just ended or needs another pass."""
        if self._observer is None or self._bases:
            return False
        if not self._observer.needs_another_pass():
            self._prepare_bases(Artifact(self._observer.kind, self._observer.average()))
            self._prompts = 0
        return True

    def average(self) -> dict[str, Tensor]:
        """Return the means over prompts and the tensors of the base's calibration."""
        return super().average() | ({} if self._observer is None else self._observer.average())

    def rank(self, view: View, number: int) -> Tensor:
        """Return the scores at the capacity of index `number` by position, float32 [rows, c_k]; -inf without a slot."""
        base = self._bases[0 if self.base.same_at_any_capacity else number]
        scores = scatter_to_positions(base.ranked_scores(view), view)
        return scores.masked_fill(~find_existing(view), -torch.inf)

    def _prepare_bases(self, artifact: Artifact | None) -> None:
        """Prepare a copy of the base for each capacity, or at least its minimum; one copy if scores are equal."""
        spec, minimum = self.spec, find_min_capacity(self.base, self.spec)
        for capacity in self._capacities[-1:] if self.base.same_at_any_capacity else self._capacities:
            tokens, base = max(capacity, minimum) * spec.all_heads, deepcopy(self.base)
            base.prepare(spec, Budget(Fraction(tokens), spec.full_tokens, spec.all_heads), artifact)
            self._bases.append(base)

    def _update_state(self, view: View) -> None:
        """Set the state of all slots, and let the base observe the segment."""
        state = view.position.new_zeros(len(view.position), view.segment.end, dtype=torch.float32)
        if view.segment.index:
            state[:, : view.segment.start] = self._states[view.layer]
        view.state = state.gather(1, view.position.clamp(min=0))
        self._bases[0].observe(view)
        self._states[view.layer] = scatter_to_positions(view.state, view)


def list_capacities(spec: ModelSpec) -> list[int]:
    """Return the capacities of a head at which errors are measured, in rising order."""
    full = spec.cached_length
    steps = (full * 128 ** (i / (CAPACITY_COUNT - 1) - 1) for i in range(CAPACITY_COUNT))
    return sorted({0, *(max(1, round(step)) for step in steps)})


def scatter_to_positions(values: Tensor, view: View) -> Tensor:
    """Scatter values of slots [rows, slots] to positions [rows, c_k]; positions without a slot are 0."""
    end = view.segment.end
    rows = values.new_zeros(len(values), end + 1)
    return rows.scatter_(1, torch.where(view.position < 0, end, view.position), values)[:, :end]


def find_existing(view: View) -> Tensor:
    """Return which positions have a slot, bool [rows, c_k]."""
    return scatter_to_positions((view.position >= 0).float(), view).bool()


def find_min_capacity(base: Scored, spec: ModelSpec) -> int:
    """Return the minimum capacity of a head with which a method works."""
    return max(1, count_sinks(spec, base.sinks, base.leading) + base.count_reserved(spec))


@dataclass(kw_only=True)
class CalibratedCapacities(Wrapper):
    """Allocate capacity to heads by a calibration with the base's scores; the base chooses the tokens.

    A subclass writes `needs` and `allocate`.

    Raises:
        ConfigError: the base allocates capacity among heads or layers itself, or does not score every segment.
    """

    heads_independent = False  # heads of all layers share B

    def __post_init__(self) -> None:
        """Refuse bases with capacities of their own."""
        super().__post_init__()
        name = type(self.base).__name__
        if not self.base.uniform_capacity:
            raise ConfigError(
                f"method.base: {name} shares capacity among heads or layers itself; choose a base with equal "
                "capacities, such as method.base=h2o"
            )
        if self.refresh > 1 or self.ema or self.base.keeps_scores:
            raise ConfigError(
                "method.base.refresh, method.base.ema, method.base.asked: the calibration needs scores of every "
                "segment; set method.base.refresh=1 method.base.ema=0, and method.base.asked=every if the base has it"
            )
        if not isinstance(self.base.needs(), Observer | None):
            raise ConfigError(f"method.base: {name} reads a file; choose a base that does not")

    def allocate(self, tensors: dict[str, Tensor], spec: ModelSpec, budget: Budget) -> Ints:
        """Return the capacity of each head after each cached segment, int64 [K - 1, L, H]."""
        raise NotImplementedError

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Allocate the capacity to the base's heads by the calibration."""
        super().prepare(spec, budget, artifact)
        tensors = require_artifact(artifact, f"method={self.title}:")
        self.capacities = self.allocate(tensors, spec, budget)
        self.base.assign_capacities(self.capacities)
