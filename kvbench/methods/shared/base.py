"""Base classes of methods and of calibrations, and the artifact that a calibration leaves."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.config import UserError
from kvbench.core.segments import Family, ModelSpec, Segment
from kvbench.methods.shared.capabilities import ObservesLast
from kvbench.methods.shared.view import View

ADDED: Mapping[str, object] = {"refresh": 1, "ema": 0, "fill": False}
"""Settings that came when methods had runs already, with the value that changes nothing: identities leave that out."""


class NotANumber(UserError, FloatingPointError):
    """Scores of a method with NaN, which order no tokens; the message names method, layer and segment."""


@dataclass(frozen=True)
class Artifact:
    """Result of a calibration, and the conditions under which it was made.

    Attributes:
        kind: name of the observer that made it.
        tensors: the calibrated values, by name.
        metadata: model, weights hash, schedule, prompts hash and settings, all JSON values; a run checks them.
    """

    kind: str
    tensors: dict[str, Tensor]
    metadata: dict[str, Any] = field(default_factory=dict)


class Limit(NamedTuple):
    """Range of a setting that is a number.

    Attributes:
        low: smallest value.
        high: largest value.
        wants: text of the message in place of the range.
    """

    low: float
    high: float = inf
    wants: str = ""

    def check(self, name: str, value: float | None) -> None:
        """Refuse a value out of range, NaN included; None passes.

        Raises:
            ValueError: naming the setting.
        """
        if value is not None and not self.low <= value <= self.high:
            range_ = f"be at least {self.low}" if self.high == inf else f"lie in {self.low}..{self.high}"
            raise ValueError(f"method.{name}={value}: {self.wants or f'must {range_}'}")


SHARE = Limit(0, 1)


def set_limits(**limits: Limit) -> Mapping[str, Limit]:
    """Return `Method.limits`, the range of each setting by its name."""
    return limits


def require_artifact(artifact: Artifact | None, lead: str) -> dict[str, Tensor]:
    """Return the tensors of a calibration.

    Raises:
        ValueError: there is none; the message is `lead`, then how to calibrate.
    """
    if artifact is None:
        raise ValueError(f"{lead} calibrate first (python run.py task=calibrate)")
    return artifact.tensors


class Method:
    """Rule for what a cache keeps. Subclasses are dataclasses; their fields are the method's settings.

    A method implements `keep`, and sets `static` or implements `capacity`. What a few methods need beside that are
    mixins (`kvbench.methods.shared.capabilities`).

    Attributes:
        families: model families that the method supports; `check` refuses others.
        limits: ranges of settings by name; `check` refuses values outside.
        static: `keep` depends on the layer, the segment and the positions of the slots only, never on data or on the
            sequence. The cache then calls it once per (layer, segment) and reuses the result.
        revision: raised when the same settings come to keep other tokens, so that earlier runs are not reused.
        strict: exceeding the budget is an error; otherwise tables show the measured peak. A field where a method can
            be either.
        spec: the model's shapes, set by `prepare`.
        budget: the budget B, set by `prepare`.
    """

    families: ClassVar[tuple[Family, ...]] = ("next-scale", "next-token")
    limits: ClassVar[Mapping[str, Limit]] = {}
    static: ClassVar[bool] = False
    revision: ClassVar[int] = 0
    strict: bool = True

    spec: ModelSpec
    budget: Budget

    @property
    def budgeted(self) -> bool:
        """Whether the budget changes what is kept or stops a run; if not, runs at all budgets are one run."""
        return True

    @property
    def heads_independent(self) -> bool:
        """Whether heads are independent, so that tensor-parallel processes can each own some."""
        return self.needs() is None

    def needs(self) -> "Observer | Path | None":
        """Return the calibration that `prepare` requires, or the file that replaces it; None if neither."""
        return None

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Check settings against shapes and budget, before weights are loaded and before any calibration.

        Overrides call this method first.

        Raises:
            InfeasibleBudget: the budget is below what the method must keep.
            ValueError: the model is of another family, or a setting is out of range or does not fit the model.
        """
        if spec.family not in self.families:
            raise ValueError(
                f"method: {type(self).__name__} is for {' and '.join(self.families)} models and {spec.name} is a "
                f"{spec.family} model; take one of the methods that task=plan model={spec.name} lists"
            )
        for name, limit in self.limits.items():
            limit.check(name, getattr(self, name))

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Set up for a model and a budget, before any generation.

        Args:
            spec: the model's shapes.
            budget: the budget B.
            artifact: the calibration that `needs` asked for.

        Raises:
            ValueError, InfeasibleBudget: what `check` refuses, or a calibration is missing.
        """
        self.check(spec, budget)
        self.spec, self.budget = spec, budget

    def capacity(self, layer: int, segment: Segment) -> int | tuple[int, ...] | None:
        """Return the slots that a row of this layer holds after a segment; None where they depend on data.

        Every row then holds this many slots, or all that it has seen where those are fewer; `keep` must agree with it.
        Padding in front of a prompt may count as held (`View.padding_charge`). An int is for all KV heads, a tuple has
        one entry per head. Storage and `task=plan` derive the lengths of rows from it. A static method need not
        implement it: its `keep` is called beforehand instead.
        """
        return None

    def keep(self, view: View) -> Tensor | None:
        """Select the slots that stay: bool [rows, slots], or [heads, slots] from a static method; None keeps all."""
        raise NotImplementedError


class Observer(ObservesLast, Method):
    """Calibration: a method that keeps everything and accumulates statistics.

    Subclasses are dataclasses; their fields are the calibration's settings.

    Attributes:
        kind: name of the artifact.
        sums: float64 sum over prompts of each tensor, by name.
    """

    kind: ClassVar[str]
    sums: dict[str, Tensor]

    def tensor_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the calibrated tensors, by name."""
        raise NotImplementedError

    def accumulate(self, view: View) -> None:
        """Add the statistics of one layer, summed over the prompts of the batch, to `sums`."""
        raise NotImplementedError

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Start the sums at zero."""
        super().prepare(spec, budget, artifact)
        shapes = self.tensor_shapes(spec)
        self.sums = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
        self._prompts = 0

    def capacity(self, layer: int, segment: Segment) -> int:
        """Return the tokens so far: nothing is dropped."""
        return segment.end

    def keep(self, view: View) -> None:
        """Accumulate one layer and keep everything."""
        if view.layer == 0 and view.segment.index == 0:
            self._prompts += view.sequences // self.spec.branches
        self.accumulate(view)

    def select_conditional(self, rows: Tensor) -> Tensor:
        """Return the conditional sequences' part of values [rows, ...]: float64 [prompts, heads, ...] on the CPU."""
        sequences = rows.unflatten(0, (-1, self.spec.heads))
        return sequences[: len(sequences) // self.spec.branches].double().cpu()

    def look_again(self) -> bool:
        """Return whether the same generations are to be shown once more; called when all of them were shown."""
        return False

    def average(self) -> dict[str, Tensor]:
        """Return the means over the prompts seen, by name; zeros when none were."""
        return {name: sums / max(self._prompts, 1) for name, sums in self.sums.items()}

    def make_stand_in(self, spec: ModelSpec) -> Artifact:
        """Make an artifact of random numbers, equal in every call: good for timing, nothing else.

        What methods do with it takes the time that a real one takes, but rows may become longer or shorter.
        """
        generator = torch.Generator().manual_seed(0)
        tensors = {
            name: torch.rand(shape, generator=generator, dtype=torch.float64)
            for name, shape in self.tensor_shapes(spec).items()
        }
        return Artifact(self.kind, tensors)
