"""Calibrations: statistics of generations with the full cache, which a method reads when it is prepared."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvbench.core.segments import ModelSpec
from kvbench.methods.shared.uses import Uses
from kvbench.methods.shared.view import View


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


def require_artifact(artifact: Artifact | None, lead: str) -> dict[str, Tensor]:
    """Return the tensors of a calibration; for None raise a ValueError that begins with `lead`."""
    if artifact is None:
        raise ValueError(f"{lead} calibrate first (python run.py task=calibrate)")
    return artifact.tensors


class Observer:
    """Calibration that accumulates statistics of generations with the full cache.

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

    def needs_another_pass(self) -> bool:
        """Return whether the calibration needs another pass; called after each pass over all prompts."""
        return False

    def average(self) -> dict[str, Tensor]:
        """Return the means over the observed prompts, by name; zeros without prompts."""
        return {name: sums / max(self._prompts, 1) for name, sums in self.sums.items()}

    def make_random_artifact(self, spec: ModelSpec) -> Artifact:
        """Make an artifact of random values, equal in each call, for timing only.

        Methods take as long with it as with a real artifact, but rows may be longer or shorter.
        """
        generator = torch.Generator().manual_seed(0)
        tensors = {
            name: torch.rand(shape, generator=generator, dtype=torch.float64)
            for name, shape in self.tensor_shapes(spec).items()
        }
        return Artifact(self.kind, tensors)
