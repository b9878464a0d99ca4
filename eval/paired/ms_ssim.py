"""MS-SSIM: structural similarity over five scales, by torchmetrics."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.eval.networks import Pixels, to_unit
from kvbench.eval.paired.base import Measure, PairedScore
from kvbench.eval.protocol.scores import MetricSpec

MIN_SIDE = 176
"""Minimum side in pixels: the window of 11 pixels, doubled four times."""


@dataclass(frozen=True)
class MsSsim(PairedScore):
    """`ms_ssim`: multi-scale structural similarity (Wang, Simoncelli and Bovik, 2003), computed by torchmetrics.

    Window and constants of `ssim` at five scales with the paper's exponents, in float32; negative terms count as zero.
    Contrast of the first four scales is averaged over the valid region, similarity of the last scale over all positions
    with a reflected border. Smaller images are left out.

    Attributes:
        double: compute in float64; see `Ssim`.
    """

    double: bool = False
    name: ClassVar[str] = "ms_ssim"
    revision: ClassVar[int] = 2  # since 2, torchmetrics' order of operations: changes of up to 3e-7
    protocol: ClassVar[str] = "gaussian11x5"
    packages: ClassVar[tuple[str, ...]] = ("torchmetrics",)
    min_side: ClassVar[tuple[int, str]] = (MIN_SIDE, "five scales")
    metric: ClassVar[str] = name
    spec: ClassVar[MetricSpec] = MetricSpec("higher")

    def load(self, device: str) -> tuple[Measure, Mapping[str, str]]:
        """Return the similarity function, which needs no files."""
        return lambda ours, theirs: [ms_ssim(ours, theirs, device, double=self.double)], {}


def ms_ssim(ours: Pixels, theirs: Pixels, device: str, *, double: bool) -> Tensor:
    """Return the similarity [N] of images uint8 [N, H, W, 3]; raise ValueError if they are too small for 5 scales."""
    from torchmetrics.functional.image import multiscale_structural_similarity_index_measure as measure

    if min(ours.shape[1:3]) < MIN_SIDE:
        raise ValueError(f"ms_ssim needs {MIN_SIDE} pixels a side, got {ours.shape[2]}x{ours.shape[1]}")
    dtype = torch.float64 if double else torch.float32
    first, second = (to_unit(side, device, dtype) for side in (ours, theirs))
    values: Tensor = measure(first, second, data_range=1.0, reduction="none", normalize="relu")
    return values
