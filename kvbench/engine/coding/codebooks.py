"""Calibration of static codebooks for each channel of keys and values, per layer, head and source."""

from collections.abc import Container
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec
from kvbench.engine.coding.formats import count_sources
from kvbench.kernels.quantise import fit_affine, fit_book
from kvbench.methods.shared.base import Artifact, Observer
from kvbench.methods.shared.view import View

BITS = (2, 3, 4)
"""Widths of codes that have codebooks; codes of 8 bits have a scale, for 256 levels of each channel would be many."""
MARGIN = 0.25
"""Margin of 8-bit scales beyond the calibrated range, at both ends, as a share of the range."""


def augment_samples(samples: Tensor, count: int) -> Tensor:
    """Return numbers that a channel is likely to have too, [heads, channels, count].

    They are quantiles of what all channels have, each at a mean of 0 and a deviation of 1, brought to the channel's
    own: few samples of one channel say little of how often its numbers come far from the mean.

    Args:
        samples: float32 [heads, channels, n].
        count: how many.
    """
    deviation, mean = torch.std_mean(samples, -1, correction=0, keepdim=True)
    alike = ((samples - mean) / deviation.clamp(min=1e-6)).flatten().sort().values
    place = (torch.arange(count) + 0.5) * (len(alike) / count)
    return mean + deviation * alike[place.long()]


@dataclass
class Codebooks(Observer):
    """Watches keys before rotation, and values, and fits a Lloyd-Max codebook to each channel of them.

    Attributes:
        tokens: evenly spaced tokens of each segment and sequence that are looked at.
        before_rotation: keys are looked at as they are before the model turns them.
        augmented: numbers that each channel is given beside its own for every level of its codebook
            (`augment_samples`).
    """

    tokens: int = 32
    before_rotation: bool = True
    augmented: int = 64
    _seen: dict[tuple[int, int], list[tuple[int, Tensor, Tensor]]] = field(
        default_factory=dict, init=False, repr=False
    )

    kind: ClassVar[str] = "codebooks"
    observes_last: ClassVar[bool] = False

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Forget all tokens."""
        super().prepare(spec, budget, artifact)
        self._seen.clear()

    def tensor_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """Return the shapes of levels [L, H, sources, D, 2^bits], and of scale and zero of 8 bits."""
        shape = (spec.layers, spec.heads, count_sources(spec), spec.head_dim)
        widths = {bits: 1 << bits for bits in BITS} | {8: 2}
        return {
            f"{name}_{bits}": (*shape, width) for name in ("keys", "values") for bits, width in widths.items()
        }

    def accumulate(self, view: View) -> None:
        """Note some tokens of a segment, in float16 on the CPU."""
        if view.segment.last:
            return
        source = min(view.segment.index, count_sources(self.spec) - 1)
        count = min(self.tokens, view.segment.length)
        chosen = torch.arange(count) * view.segment.length // count
        found = []
        for part in (view.keys(rotated=not self.before_rotation), view.values()):
            some = part.index_select(1, chosen.to(part.device, non_blocking=True))
            found.append(some.unflatten(0, (-1, view.heads)).transpose(0, 1).flatten(1, 2).half().cpu())
        self._seen.setdefault((view.layer, source), []).append((self._prompts, found[0], found[1]))

    def average(self) -> dict[str, Tensor]:
        """Return the codebooks of the tokens seen, float16 by name; zeros where none were."""
        return self.fit()

    def fit(self, without: Container[int] = ()) -> dict[str, Tensor]:
        """Fit codebooks to the tokens seen, but for those of some batches, counted from 1."""
        shapes = self.tensor_shapes(self.spec)
        books = {name: torch.zeros(shape, dtype=torch.float16) for name, shape in shapes.items()}
        for (layer, source), parts in self._seen.items():
            tokens = [part[1:] for part in parts if part[0] not in without]
            for name, some in zip(("keys", "values"), zip(*tokens, strict=True), strict=False):
                samples = torch.cat(some, 1).mT.float()
                for bits in BITS:
                    likely = torch.cat((samples, augment_samples(samples, self.augmented << bits)), -1)
                    books[f"{name}_{bits}"][layer, :, source] = fit_book(likely, bits)
                smallest, largest = likely.aminmax(dim=-1)
                more = MARGIN * (largest - smallest)
                books[f"{name}_8"][layer, :, source] = fit_affine(smallest - more, largest + more, 8)
        return books

    def make_stand_in(self, spec: ModelSpec) -> Artifact:
        """Make codebooks of random numbers, ascending: good for timing, nothing else."""
        made = super().make_stand_in(spec)
        return Artifact(self.kind, {name: x.sort(-1).values.half() for name, x in made.tensors.items()})
