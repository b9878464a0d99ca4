"""The method contract: what a method is told, what it may look at, what it answers."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from torch import Tensor

from kvbench.budget import Budget
from kvbench.segments import ModelSpec, Segment


@dataclass(frozen=True)
class Artifact:
    """What a calibration leaves behind, with the provenance that makes it checkable.

    Attributes:
        kind: name of the observer that made it ("scas", "cas").
        tensors: the calibrated values, by name.
        metadata: model, weights hash, schedule, prompts hash, settings; all JSON values.
    """

    kind: str
    tensors: dict[str, Tensor]
    metadata: dict[str, Any] = field(default_factory=dict)


class View(Protocol):
    """One layer right after a segment ran: what a method may look at.

    Rows are (sequence, KV head), sequence-major: row = sequence x heads + head. Slots are the cached tokens followed by
    those of the current segment, in position order.
    """

    layer: int
    at: Segment
    sequences: int
    heads: int
    position: Tensor  # int64 [rows, slots], -1 where the row has no such slot
    segment: Tensor  # int64 [rows, slots], index of the segment the token came from, -1 where empty

    def mass(self) -> Tensor:
        """float32 [rows, slots]: attention each slot receives, mean over the current segment's queries."""
        ...

    def segment_mass(self) -> Tensor:
        """float32 [rows, at.index + 1]: `mass` summed over the slots of each source segment."""
        ...


class Method:
    """What a cache keeps. Subclasses are dataclasses; their fields are the method's settings.

    Attributes:
        static: the answer of `keep` depends on the layer, the segment and the slots' positions only, never on data or
            sequence. The cache then asks once per (layer, segment) and reuses the answer.
        strict: exceeding the budget is an error; otherwise the measured peak is what tables show.
        observes_last: `keep` is also called at the last segment, where its answer is ignored.
        calibration: kind of the artifact that `prepare` needs, None for none.
    """

    static: ClassVar[bool] = False
    strict: ClassVar[bool] = True
    observes_last: ClassVar[bool] = False
    calibration: ClassVar[str | None] = None

    spec: ModelSpec
    budget: Budget

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuses what can never work, from shapes alone, before weights are loaded or anything is calibrated.

        Raises:
            InfeasibleBudget: the budget is below what the method must keep.
            ValueError: a setting does not fit the model.
        """

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Called once per model and budget, before any generation; raises what `check` raises."""
        self.check(spec, budget)
        self.spec, self.budget = spec, budget

    def keep(self, view: View) -> Tensor | None:
        """Slots to keep from now on: bool [rows, slots] ([heads, slots] for a static method); None keeps all."""
        raise NotImplementedError
