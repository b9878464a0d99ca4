"""Calibration of static codebooks for each channel of keys and values, per layer, head and source."""

from collections.abc import Container
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.core.segments import ModelSpec
from kvbench.engine.coding.formats import count_sources
from kvbench.kernels.quantise import fit_affine, fit_codebook
from kvbench.methods.shared.calibration import Artifact, Observer
from kvbench.methods.shared.view import View

BITS = (2, 3, 4)
"""Bits of codes with codebooks; 8-bit codes have a scale, because 256 levels per channel are too many."""
MARGIN = 0.25
"""Margin of 8-bit scales at both ends of the calibrated range, as a share of the range."""


def augment_samples(samples: Tensor, count: int) -> Tensor:
    """Return further likely values of each channel, float32 [heads, channels, count].

    They are quantiles of all channels, standardised to mean 0 and deviation 1, then scaled to each channel: a few
    samples of one channel do not show how often its values are far from the mean.

    Args:
        samples: float32 [heads, channels, n].
        count: number of values for each channel.
    """
    deviation, mean = torch.std_mean(samples, -1, correction=0, keepdim=True)
    alike = ((samples - mean) / deviation.clamp(min=1e-6)).flatten().sort().values
    rank = (torch.arange(count) + 0.5) * (len(alike) / count)
    return mean + deviation * alike[rank.long()]


def fit_codebooks(samples: Tensor, augmented: int) -> dict[int, Tensor]:
    """Return the codebooks of each channel by bits: levels [heads, channels, 2^bits], of 8 bits scale and zero.

    Args:
        samples: float32 [heads, channels, n].
        augmented: number of further values for every level (`augment_samples`).
    """
    codebooks = {}
    for bits in BITS:
        likely = torch.cat((samples, augment_samples(samples, augmented << bits)), -1)
        codebooks[bits] = fit_codebook(likely, bits)
    smallest, largest = likely.aminmax(dim=-1)
    more = MARGIN * (largest - smallest)
    codebooks[8] = fit_affine(smallest - more, largest + more, 8)
    return codebooks


@dataclass
class Codebooks(Observer):
    """Lloyd-Max codebook of each channel of keys and of values.

    Attributes:
        tokens: evenly spaced tokens of each segment and sequence that are sampled.
        before_rotation: whether keys are sampled before the rotation.
        augmented: number of further values for every level of a codebook (`augment_samples`).
    """

    tokens: int = 32
    before_rotation: bool = True
    augmented: int = 64
    _seen: dict[tuple[int, int], list[tuple[int, Tensor, Tensor]]] = field(
        default_factory=dict, init=False, repr=False
    )

    kind: ClassVar[str] = "codebooks"

    def prepare(self, spec: ModelSpec) -> None:
        """Drop all sampled tokens, for a new calibration."""
        super().prepare(spec)
        self._seen.clear()

    def tensor_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """Return shapes by name: levels [L, H, sources, D, 2^bits]; for 8 bits, scale and zero [..., 2]."""
        shape = (spec.layers, spec.heads, count_sources(spec), spec.head_dim)
        widths = {bits: 1 << bits for bits in BITS} | {8: 2}
        return {
            f"{name}_{bits}": (*shape, width) for name in ("keys", "values") for bits, width in widths.items()
        }

    def accumulate(self, view: View) -> None:
        """Store some tokens of a segment, in float16 on the CPU."""
        if view.segment.last:
            return
        source = min(view.segment.index, count_sources(self.spec) - 1)
        count = min(self.tokens, view.segment.length)
        chosen = torch.arange(count) * view.segment.length // count
        sampled = []
        for part in (view.keys(rotated=not self.before_rotation), view.values()):
            some = part.index_select(1, chosen.to(part.device, non_blocking=True))
            sampled.append(some.unflatten(0, (-1, view.heads)).transpose(0, 1).flatten(1, 2).half().cpu())
        self._seen.setdefault((view.layer, source), []).append((self._prompts, sampled[0], sampled[1]))

    def average(self) -> dict[str, Tensor]:
        """Return the codebooks of all sampled tokens, float16 by name; zeros without tokens."""
        return self.fit()

    def fit(self, without: Container[int] = ()) -> dict[str, Tensor]:
        """Fit codebooks to the sampled tokens, except those of the batches `without`, counted from 1."""
        shapes = self.tensor_shapes(self.spec)
        codebooks = {name: torch.zeros(shape, dtype=torch.float16) for name, shape in shapes.items()}
        for (layer, source), parts in self._seen.items():
            tokens = [part[1:] for part in parts if part[0] not in without]
            for name, some in zip(("keys", "values"), zip(*tokens, strict=True), strict=False):
                samples = torch.cat(some, 1).mT.float()
                for bits, codebook in fit_codebooks(samples, self.augmented).items():
                    codebooks[f"{name}_{bits}"][layer, :, source] = codebook
        return codebooks

    def make_random_artifact(self, spec: ModelSpec) -> Artifact:
        """Make codebooks of ascending random values, for timing only."""
        made = super().make_random_artifact(spec)
        return Artifact(self.kind, {name: x.sort(-1).values.half() for name, x in made.tensors.items()})
