"""The small feature network of the scenes world, and the perceptual distance on its stages.

It stands where Inception and AlexNet stand for photographs, and its scores carry their own names
(`fid_scenes`, `lpips_scenes`): they compare with each other, never with published FID or LPIPS.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from kvbench.eval.base import Better, Result, mean_score, ok
from kvbench.eval.images import ImageSet
from kvbench.eval.weights import Weight

WIDTHS = (16, 32, 48, 64)
BATCH = 64


class Stage(nn.Module):
    """Halves the resolution, then refines with a residual convolution."""

    def __init__(self, inputs: int, outputs: int, *, refine: bool) -> None:
        super().__init__()
        self.down = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1)
        self.refine = nn.Conv2d(outputs, outputs, 3, padding=1) if refine else None

    def forward(self, x: Tensor) -> Tensor:
        """[N, inputs, H, W] to [N, outputs, H/2, W/2], not negative."""
        x = F.relu(self.down(x))
        return x if self.refine is None else F.relu(x + self.refine(x))


class SceneFeatures(nn.Module):
    """Four convolutional stages and a linear head, without normalisation layers.

    Args:
        outputs: logits of the head, which only training looks at.
    """

    def __init__(self, outputs: int) -> None:
        super().__init__()
        pairs = zip((3, *WIDTHS), WIDTHS, strict=False)
        # The first stage runs at the highest resolution: one convolution there costs as much as the next two.
        self.layers = nn.ModuleList(Stage(a, b, refine=i > 0) for i, (a, b) in enumerate(pairs))
        self.head = nn.Linear(WIDTHS[-1], outputs)

    @classmethod
    def load(cls, path: Path) -> "SceneFeatures":
        """Reads a trained network (safetensors, any float type) into float32.

        Raises:
            ValueError: the file holds another network.
        """
        tensors = {name: tensor.float() for name, tensor in load_file(path).items()}
        if "head.weight" not in tensors:
            raise ValueError(f"{path}: not a scenes feature network, it has no head.weight")
        network = cls(len(tensors["head.weight"]))
        try:
            network.load_state_dict(tensors)
        except RuntimeError as error:
            raise ValueError(f"{path}: not a scenes feature network: {error}") from error
        return network.eval()

    def stages(self, images: Tensor) -> list[Tensor]:
        """Maps [N, 16 | 32 | 48 | 64, H/2 .. H/16, W/2 .. W/16] of float images [N, 3, H, W] in [0, 1]."""
        maps, x = [], images * 2 - 1
        for layer in self.layers:
            x = layer(x)
            maps.append(x)
        return maps

    def features(self, images: Tensor) -> Tensor:
        """[N, 64]: the last stage averaged over positions, images as in `stages`."""
        return self.stages(images)[-1].mean((2, 3))

    def forward(self, images: Tensor) -> Tensor:
        """Logits [N, outputs], images as in `stages`."""
        logits: Tensor = self.head(self.features(images))
        return logits


def to_unit(pixels: NDArray[np.uint8], device: str = "cpu") -> Tensor:
    """uint8 [N, H, W, 3] to float32 [N, 3, H, W] in [0, 1]."""
    return torch.from_numpy(pixels).to(device).permute(0, 3, 1, 2).float() / 255


def perceptual_distance(
    first: Sequence[Tensor], second: Sequence[Tensor], weights: Sequence[Tensor] | None = None
) -> Tensor:
    """LPIPS on given feature maps (Zhang et al., arXiv:1801.03924, eq. 1).

    Features are normalised to unit length over channels; their squared difference is weighted by channel,
    summed over channels, averaged over positions and summed over stages.

    Args:
        first: maps [N, C_s, H_s, W_s], one a stage.
        second: maps of the other images, same shapes.
        weights: channel weights [C_s] a stage; by default all 1 / number of stages, which makes the distance
            the mean over stages of 2 - 2 cos.

    Returns:
        [N] distances.
    """
    total = torch.zeros(len(first[0]), dtype=first[0].dtype, device=first[0].device)
    for stage, (a, b) in enumerate(zip(first, second, strict=True)):
        squared = (_unit_length(a) - _unit_length(b)).square()
        if weights is None:
            total += squared.sum(1).mean((1, 2)) / len(first)
        else:
            total += (squared * weights[stage][:, None, None]).sum(1).mean((1, 2))
    return total


def _unit_length(maps: Tensor) -> Tensor:
    return maps / (maps.square().sum(1, keepdim=True).sqrt() + 1e-10)


@dataclass(frozen=True)
class OnScenes:
    """What the metrics on the scenes feature network share.

    Attributes:
        path: weight file of the network.
    """

    path: str | None = None
    name: ClassVar[str]
    needs_reference: ClassVar[bool] = True
    packages: ClassVar[tuple[str, ...]] = ()

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The scenes feature network: `path`, or features.safetensors in $KVBENCH_WEIGHTS."""
        how = "train it with: python run.py task=train"
        return (Weight("features.safetensors", how=how, path=self.path),)

    def network(self, device: str) -> tuple[SceneFeatures, dict[str, str]]:
        """The network and the hash of its file by name."""
        file, sha256 = self.weights[0].require()
        return SceneFeatures.load(file).to(device), {file.name: sha256}

    def pairs(self, images: ImageSet, reference: ImageSet, device: str) -> Iterator[Tensor]:
        """Batches in [0, 1], images first, then as many of the reference.

        Both sides in one pass: equal images then have equal features, whatever the kernel.
        """
        for batch in images.batches(BATCH, self.name):
            yield to_unit(np.concatenate([images.stack(batch), reference.stack(batch)]), device)


@dataclass(frozen=True)
class LpipsScenes(OnScenes):
    """`lpips_scenes`: perceptual distance to the reference on the scenes feature network."""

    name: ClassVar[str] = "lpips_scenes"
    protocol: ClassVar[str] = "unit"
    gives: ClassVar[Mapping[str, Better]] = {"lpips_scenes": "lower"}

    @torch.inference_mode()
    def run(self, images: ImageSet, reference: ImageSet | None, device: str) -> Result:
        """Distance of each image to the reference's, and their mean."""
        assert reference is not None
        network, weights = self.network(device)
        values: list[float] = []
        for both in self.pairs(images, reference, device):
            half = [m.chunk(2) for m in network.stages(both)]
            values += perceptual_distance([a for a, _ in half], [b for _, b in half]).tolist()
        scores = {"lpips_scenes": mean_score(values, "lower", clusters=images.clusters)}
        return ok(self, scores, {"index": images.indices, "lpips_scenes": values}, weights)
