"""Base class of methods."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import Family, ModelSpec, Segment
from kvbench.methods.shared.calibration import Artifact, Observer
from kvbench.methods.shared.limits import Limit
from kvbench.methods.shared.plans import Planned
from kvbench.methods.shared.precision import Precision
from kvbench.methods.shared.uses import Uses
from kvbench.methods.shared.view import View


class Method(Planned):
    """Rule for what a cache keeps. Subclasses are dataclasses; their fields are the method's settings.

    A method implements `keep`, and sets `static` or implements `capacity`. A method that needs more of the engine
    defines `uses`, and implements the hooks that `Uses` names, which are not called otherwise. `prepare` sets `spec`,
    the model's shapes, and `budget`.

    Attributes:
        families: model families that the method supports; `check` refuses other families.
        limits: ranges of settings by name; `check` refuses values outside.
        static: `keep` depends on the layer, the segment and the positions of the slots only, never on data or on the
            sequence. The cache then calls it once per (layer, segment) and reuses the result.
        follows_budget: what is kept depends on the budget; otherwise a run only stops where it is exceeded.
        recordable: whether scales can be recorded although the method reads data, see `graph_obstacle`.
        revision: increased when the same settings keep different tokens, so that old runs are not reused.
        strict: exceeding the budget is an error; otherwise tables show the measured peak. A dataclass field if a
            method can be either.
    """

    families: ClassVar[tuple[Family, ...]] = ("next-scale", "next-token")
    limits: ClassVar[Mapping[str, Limit]] = {}
    static: ClassVar[bool] = False
    follows_budget: ClassVar[bool] = True
    recordable: ClassVar[bool] = False
    revision: ClassVar[int] = 0
    strict: bool = True

    @property
    def uses(self) -> Uses:
        """What the method needs of the engine; it depends on settings only."""
        return Uses()

    def needs(self) -> Observer | Path | None:
        """Return the calibration that `prepare` requires, or a file that replaces it; None for neither."""
        return None

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Check settings against shapes and budget, before weights are loaded and any calibration.

        Overrides call this method first.

        Raises:
            InfeasibleBudget: the budget is below what the method must keep.
            ValueError: the model is of another family, or a setting is out of range or does not fit the model.
        """
        if spec.family not in self.families:
            raise ValueError(
                f"method={self.title}: is for {' and '.join(self.families)} models and {spec.name} is a "
                f"{spec.family} model; use one of the methods that task=plan model={spec.name} lists"
            )
        for name, limit in self.limits.items():
            limit.check(name, getattr(self, name))

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Set up for a model and a budget, before any generation, with the calibration that `needs` returned.

        Raises:
            ValueError, InfeasibleBudget: what `check` refuses, or a calibration is missing.
        """
        self.check(spec, budget)
        super().prepare(spec, budget, artifact)

    def capacity(self, layer: int, segment: Segment) -> int | tuple[int, ...] | None:
        """Return the slots that a row of this layer holds after a segment; None where they depend on data.

        Each row then holds this number of slots, or all tokens so far if they are fewer; `keep` must agree. Padding in
        front of a prompt may count as held (`View.padding_charge`). An int is for all KV heads, a tuple has one entry
        per head. Storage and `task=plan` derive the lengths of rows from it. A static method need not implement it,
        because its `keep` is called in advance.
        """
        return None

    def keep(self, view: View) -> Tensor | None:
        """Select the slots to keep: bool [rows, slots], or [heads, slots] from a static method; None keeps all."""
        raise NotImplementedError

    def compares_keys(self, layer: int, segment: Segment) -> bool:
        """Return whether `keep` may read the keys of `segment` after the next segment.

        The cache calls it after `keep`, and only if `uses.previous_keys` is set.
        """
        return True

    def select_attended(self, view: View) -> Tensor | None:
        """Select the slots to attend to, the segment's own among them: bool [rows, slots]; None selects all.

        If `uses.sparse_reads` is set, the cache calls it for each segment whose tokens come at once, and for each token
        of a next-token model that comes by itself; the view then ends with that token, whose query is the last. A
        prompt attends to all of itself. Slots that are not selected stay in the cache unless `keep`, which is called
        afterwards, drops them.
        """
        raise NotImplementedError

    def compare_layers(self, views: Sequence[View]) -> None:
        """Read the views of all layers, in order, before `keep` is called for each layer.

        The cache calls it only if `uses.joint` is set. Until then tokens of the segment are pending in all layers.
        """
        raise NotImplementedError

    def precisions(self, layer: int, segment: Segment) -> Sequence[Precision] | None:
        """Return the precision in which each KV head of a layer stores a segment; None uses the run's `cache_dtype`.

        The cache calls it only if `uses.precisions` is set.
        """
        raise NotImplementedError

    @property
    def budgeted(self) -> bool:
        """Whether the budget changes what is kept or stops a run; otherwise runs at all budgets are one run."""
        return self.follows_budget or self.strict

    @property
    def heads_independent(self) -> bool:
        """Whether heads are independent, so that tensor-parallel processes can each own some."""
        return self.needs() is None

    @property
    def graph_obstacle(self) -> str | None:
        """Why a scale of an image cannot be recorded in a CUDA graph under this method; None if it can.

        The device alone repeats a recorded scale. `capacity` must therefore give the lengths of rows. `keep` must
        read no value on the host, copy the same values from it in every generation, not write to such a copy, and keep
        no tensor between its calls except `View.state`. A subclass declares all this by `recordable`, and overrides
        this property if it depends on settings.
        """
        if self.static:
            return None
        uses = self.uses
        if uses.sparse_reads:
            return "the slots that it attends to depend on data"
        if uses.lse_queries:
            return "the log-sum-exp of queries is read after every segment"
        return None if self.recordable else "it may read values of the device after every layer"
