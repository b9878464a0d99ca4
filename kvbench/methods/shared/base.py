"""Base classes of methods and of calibrations, and the artifact of a calibration."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import inf
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.config import UserError
from kvbench.core.segments import Family, ModelSpec, Segment
from kvbench.core.storage import Precision
from kvbench.methods.shared.uses import Uses
from kvbench.methods.shared.view import View

MAX_PLANS = 64
"""Plans for lengths of prompts that a method holds between batches."""


class NotANumber(UserError, FloatingPointError):
    """Scores of a method contain NaN and cannot order tokens; the message names method, layer and segment."""


class WrongTensor(UserError, ValueError):
    """A hook of a method returned another shape or dtype than required; the message names method, layer and segment."""


def require_tensor(
    hook: str, found: object, shape: torch.Size, layout: str, dtype: torch.dtype | None = None
) -> None:
    """Check the shape and dtype of a hook's result; nothing is read from the device.

    Args:
        hook: name of the hook.
        found: its result.
        shape: required shape.
        layout: names of the dimensions, as `[rows, slots]`.
        dtype: required dtype; None for any floating-point dtype.

    Raises:
        WrongTensor: the result differs, or is no tensor.
    """
    wanted = f"{layout} = {[*shape]}, {'floating-point' if dtype is None else str(dtype)[6:]}"
    if not isinstance(found, Tensor):
        raise WrongTensor(f"{hook} returned {type(found).__name__}; return a tensor {wanted}")
    if found.shape != shape or not (found.is_floating_point() if dtype is None else found.dtype == dtype):
        raise WrongTensor(f"{hook} returned {[*found.shape]}, {str(found.dtype)[6:]}; return {wanted}")


@dataclass(frozen=True)
class Artifact:
    """Result of a calibration and its conditions.

    Attributes:
        kind: name of the observer that made it.
        tensors: the calibrated values, by name.
        metadata: model, weights hash, schedule, prompts hash and settings as JSON values, which a run checks.
    """

    kind: str
    tensors: dict[str, Tensor]
    metadata: dict[str, Any] = field(default_factory=dict)


class Limit(NamedTuple):
    """Range of a setting that is a number.

    Attributes:
        low: smallest value.
        high: largest value.
        wants: text of the message instead of the range.
    """

    low: float
    high: float = inf
    wants: str = ""

    def check(self, name: str, value: float | None) -> None:
        """Refuse a value out of range, including NaN; None passes.

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
        ValueError: no calibration; the message is `lead`, then how to calibrate.
    """
    if artifact is None:
        raise ValueError(f"{lead} calibrate first (python run.py task=calibrate)")
    return artifact.tensors


class Method:
    """Rule for what a cache keeps. Subclasses are dataclasses; their fields are the method's settings.

    A method implements `keep`, and sets `static` or implements `capacity`. A method that needs more of the engine
    defines `uses`, and implements the hook that `Uses` names.

    Attributes:
        families: model families that the method supports; `check` refuses others.
        limits: ranges of settings by name; `check` refuses values outside.
        static: `keep` depends on the layer, the segment and the positions of the slots only, never on data or on the
            sequence. The cache then calls it once per (layer, segment) and reuses the result.
        recordable: a method that looks at data was written for recorded scales, see `graph_obstacle`.
        revision: increased when the same settings keep other tokens than before, so that old runs are not reused.
        strict: exceeding the budget is an error; otherwise tables show the measured peak. A field where a method can
            be either.
        spec: the model's shapes, set by `prepare`.
        budget: the budget B, set by `prepare`.
    """

    families: ClassVar[tuple[Family, ...]] = ("next-scale", "next-token")
    limits: ClassVar[Mapping[str, Limit]] = {}
    static: ClassVar[bool] = False
    recordable: ClassVar[bool] = False
    revision: ClassVar[int] = 0
    strict: bool = True

    spec: ModelSpec
    budget: Budget
    _longest: "ModelSpec | None" = None  # with the longest prompt, in a plan for a shorter one
    _plans: "dict[int, Self]"  # by tokens of the prompt, since `prepare`

    @property
    def calibrated_spec(self) -> ModelSpec:
        """Shapes for which calibrations are made: of the longest prompt that the model reads."""
        return self._longest or self.spec

    @calibrated_spec.setter
    def calibrated_spec(self, spec: ModelSpec) -> None:
        self._longest = spec

    @property
    def uses(self) -> Uses:
        """What the method needs of the engine; it depends on settings only."""
        return Uses()

    @property
    def budgeted(self) -> bool:
        """Whether the budget changes what is kept or stops a run; otherwise runs at all budgets are one run."""
        return True

    @property
    def heads_independent(self) -> bool:
        """Whether heads are independent, so that tensor-parallel processes can each own some."""
        return self.needs() is None

    @property
    def graph_obstacle(self) -> str | None:
        """Why a scale of an image cannot be recorded in a CUDA graph under this method; None if it can.

        A recorded scale is repeated by the device alone. `capacity` must therefore give the lengths of rows, and `keep`
        must read no number on the host, copy the same numbers from it in every generation, not write to such a copy,
        and keep no tensor between its calls but `View.state`. A subclass declares all this by `recordable`, and
        overrides this property if it depends on settings.
        """
        if self.static:
            return None
        uses = self.uses
        if uses.sparse_reads:
            return "the slots that it attends to depend on data"
        if uses.lse_queries:
            return "the log-sum-exp of queries is read after every segment"
        return None if self.recordable else "it may read numbers of the device after every layer"

    def needs(self) -> "Observer | Path | None":
        """Return the calibration that `prepare` requires, or a file that replaces it; None for neither."""
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
            artifact: the calibration that `needs` returned.

        Raises:
            ValueError, InfeasibleBudget: what `check` refuses, or a calibration is missing.
        """
        self.check(spec, budget)
        self.spec, self.budget = spec, budget
        self._artifact, self._plans = artifact, dict[int, Self]()

    def plan_for(self, tokens: int) -> Self:
        """Return the method prepared for prompts of `tokens` tokens, with the same budget in tokens.

        `prepare` plans for the longest prompt of a model or of a run. What is kept of a shorter text must not depend on
        the padding in front of its prompt. A budget in bytes has one plan, since only its bytes are known to fit.
        """
        if tokens == self.spec.segments[0].length or self.budget.bytes is not None:
            return self
        if tokens not in self._plans:
            spec = self.spec.with_prompt(tokens)
            plan = self._renew()
            plan.calibrated_spec = self.calibrated_spec
            plan.prepare(spec, replace(self.budget, full=spec.full_tokens), self._artifact)
            self.adopt_plan(tokens, plan)
        return self._plans[tokens]

    def _renew(self) -> Self:
        """Return a method of the same settings that is not prepared."""
        settings = {field.name: getattr(self, field.name) for field in fields(self) if field.init}  # type: ignore[arg-type]
        return type(self)(
            **{
                name: value._renew() if isinstance(value, Method) else value
                for name, value in settings.items()
            }
        )

    def list_plans(self, view: View) -> list[Self]:
        """Return `plan_for` the prompt of each sequence; only this method if all prompts are equally long.

        Padding that counts as held is a part of the prompt.
        """
        lengths = () if self.spec.padding_counts else view.prompt_lengths
        return [self.plan_for(tokens) for tokens in lengths] or [self]

    def adopt_plan(self, tokens: int, plan: Self) -> None:
        """Make `plan` the result of `plan_for`."""
        self._plans[tokens] = plan

    def forget_plans(self, besides: Collection[int]) -> None:
        """Drop the plans for other lengths of prompts if there are more than `MAX_PLANS`; called between batches."""
        if len(self._plans) > MAX_PLANS:
            self._plans = {tokens: plan for tokens, plan in self._plans.items() if tokens in besides}

    def capacity(self, layer: int, segment: Segment) -> int | tuple[int, ...] | None:
        """Return the slots that a row of this layer holds after a segment; None where they depend on data.

        Each row then holds this number of slots, or all tokens so far if they are fewer; `keep` must agree. Padding in
        front of a prompt may count as held (`View.padding_charge`). An int is for all KV heads, a tuple has one entry
        per head. Storage and `task=plan` derive the lengths of rows from it. A static method need not implement it,
        because its `keep` is called in advance.
        """
        return None

    def keep(self, view: View) -> Tensor | None:
        """Select the slots that stay: bool [rows, slots], or [heads, slots] from a static method; None keeps all."""
        raise NotImplementedError

    def compares_keys(self, layer: int, segment: Segment) -> bool:
        """Return whether `keep` may read the keys of `segment` after the next one; called after `keep`.

        Only if `uses.previous_keys`.
        """
        return True

    def select_attended(self, view: View) -> Tensor | None:
        """Select the slots to attend to, the segment's own among them: bool [rows, slots]; None selects all.

        Only if `uses.sparse_reads`. The cache calls it for each segment whose tokens come at once, and for each token
        of a next-token model that comes by itself; the view then ends with that token, whose query is the last. A
        prompt attends to all of itself. Slots that are not selected stay in the cache unless `keep`, which is called
        afterwards, drops them.
        """
        raise NotImplementedError

    def compare_layers(self, views: Sequence[View]) -> None:
        """Look at all layers, in order, before `keep` is called for one after the other.

        Only if `uses.joint`. Tokens of the segment are pending in all layers until then, as during the segment.
        """
        raise NotImplementedError

    def precisions(self, layer: int, segment: Segment) -> Sequence[Precision] | None:
        """Return the precision in which each KV head of a layer stores a segment; None uses the run's `cache_dtype`.

        Only if `uses.precisions`.
        """
        raise NotImplementedError


class Observer:
    """Calibration: accumulates statistics of generations with the full cache.

    Subclasses are dataclasses; their fields are the calibration's settings, and their repr names it.

    Attributes:
        kind: name of the artifact.
        spec: the model's shapes, set by `prepare`.
        sums: float64 sum over prompts of each tensor, by name.
    """

    kind: ClassVar[str]
    spec: ModelSpec
    sums: dict[str, Tensor]

    @property
    def uses(self) -> Uses:
        """What the calibration needs of the engine: `previous_keys`, `codebooks`."""
        return Uses()

    def tensor_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the calibrated tensors, by name."""
        raise NotImplementedError

    def accumulate(self, view: View) -> None:
        """Add the statistics of one layer after a segment, summed over the prompts of the batch, to `sums`."""
        raise NotImplementedError

    def prepare(self, spec: ModelSpec) -> None:
        """Set the sums to zero."""
        self.spec = spec
        shapes = self.tensor_shapes(spec)
        self.sums = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
        self._prompts = 0

    def observe(self, view: View) -> None:
        """Count the prompts of a batch and accumulate one layer."""
        if view.layer == 0 and view.segment.index == 0:
            self._prompts += view.sequences // self.spec.branches
        self.accumulate(view)

    def select_conditional(self, rows: Tensor) -> Tensor:
        """Select the conditional sequences from values [rows, ...]: float64 [prompts, heads, ...] on the CPU."""
        sequences = rows.unflatten(0, (-1, self.spec.heads))
        return sequences[: len(sequences) // self.spec.branches].double().cpu()

    def look_again(self) -> bool:
        """Return whether the calibration needs another pass; called after each pass over all prompts."""
        return False

    def average(self) -> dict[str, Tensor]:
        """Return the means over the observed prompts, by name; zeros without prompts."""
        return {name: sums / max(self._prompts, 1) for name, sums in self.sums.items()}

    def make_stand_in(self, spec: ModelSpec) -> Artifact:
        """Make an artifact of random numbers, the same in each call, for timing only.

        Methods take as long with it as with a real artifact, but rows may be longer or shorter.
        """
        generator = torch.Generator().manual_seed(0)
        tensors = {
            name: torch.rand(shape, generator=generator, dtype=torch.float64)
            for name, shape in self.tensor_shapes(spec).items()
        }
        return Artifact(self.kind, tensors)
