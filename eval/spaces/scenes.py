"""Small feature network of the scenes world, and the perceptual distance on its stages.

It replaces Inception and AlexNet. Its scores (`fid_scenes`, `lpips_scenes`) are not comparable with FID or LPIPS.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from kvbench.core.config import Range
from kvbench.core.files import hash_content
from kvbench.eval.files.images import ImageSet
from kvbench.eval.files.store import Arrays, StoredFeatures, load_features
from kvbench.eval.files.weights import Weight, loading
from kvbench.eval.networks import expecting, full_float32, to_unit
from kvbench.eval.protocol.base import Evaluator, Result
from kvbench.eval.protocol.scores import MetricSpec, mean_score
from kvbench.eval.spaces.base import Network, Space
from kvbench.eval.spaces.evaluator import finish

WIDTHS = (16, 32, 48, 64)  # channels of the stages
BATCH = 64  # images in a batch

SCENES = Weight(
    "features.safetensors",
    how="train it with: python run.py task=train",
    path="pkg://kvbench/assets/infinity_tiny/features.safetensors",
)


class DownBlock(nn.Module):
    """A convolution that halves the resolution, then a residual convolution if `refine` is set."""

    def __init__(self, inputs: int, outputs: int, *, refine: bool) -> None:
        super().__init__()
        self.down = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1)
        self.refine = nn.Conv2d(outputs, outputs, 3, padding=1) if refine else None

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, inputs, H, W] to non-negative [N, outputs, H/2, W/2]."""
        x = F.relu(self.down(x))
        return x if self.refine is None else F.relu(x + self.refine(x))


class SceneFeatures(nn.Module):
    """Four convolutional stages and a linear head for training, without normalisation layers."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        pairs = zip((3, *WIDTHS), WIDTHS, strict=False)
        # A convolution of the first stage costs as much as two of the next stage.
        self.layers = nn.ModuleList(DownBlock(a, b, refine=i > 0) for i, (a, b) in enumerate(pairs))
        self.head = nn.Linear(WIDTHS[-1], outputs)

    @classmethod
    def load(cls, path: Path) -> "SceneFeatures":
        """Load a trained network (safetensors) in float32; raise ValueError for another network."""
        tensors = {name: tensor.float() for name, tensor in load_file(path).items()}
        with expecting("a scenes feature network", path):
            network = cls(len(tensors["head.weight"]))
            network.load_state_dict(tensors)
        return network.eval()

    def stages(self, images: Tensor) -> list[Tensor]:
        """Return the maps [N, C_s, H / 2^s, W / 2^s] of stages s = 1 to 4 for images [N, 3, H, W] in [0, 1]."""
        maps, x = [], images * 2 - 1
        for layer in self.layers:
            x = layer(x)
            maps.append(x)
        return maps

    def features(self, images: Tensor) -> Tensor:
        """Return the last stage averaged over positions, [N, 64]; images as in `stages`."""
        return self.stages(images)[-1].mean((2, 3))

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [N, outputs]; images as in `stages`."""
        logits: Tensor = self.head(self.features(images))
        return logits


def perceptual_distance(first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
    """Return the LPIPS distances [N] between feature maps (Zhang et al., arXiv:1801.03924, eq. 1).

    Features are normalised to unit length over channels. Their squared difference is summed over channels, averaged
    over positions and averaged over stages.

    Args:
        first: maps [N, C_s, H_s, W_s] of each stage.
        second: maps of the other images, same shapes.
    """
    total = torch.zeros(len(first[0]), dtype=first[0].dtype, device=first[0].device)
    for a, b in zip(first, second, strict=True):
        squared = (_unit_length(a) - _unit_length(b)).square()
        total += squared.sum(1).mean((1, 2)) / len(first)
    return total


def _unit_length(maps: Tensor) -> Tensor:
    return maps / (maps.square().sum(1, keepdim=True).sqrt() + 1e-10)


@dataclass(frozen=True)
class Scenes(Space):
    """Space of the scenes network: 64 features, images at their own size.

    One pass over a run and its reference computes pooled features of both sides and the perceptual distance, which
    needs the maps. They are stored as one entry.
    """

    batch: Annotated[int, Range(1)] = BATCH
    network: Weight = SCENES
    name: ClassVar[str] = "scenes"
    paired: ClassVar[str] = "scenes"
    real: ClassVar[str] = "real_scenes"

    def load(self, file: Path, device: str) -> Network:
        """Return the loaded network, which gives 64 features per image."""
        network = SceneFeatures.load(file).to(device)
        return lambda stack: {"features": network.features(to_unit(stack, device))}

    def pair(
        self, images: ImageSet, reference: ImageSet, device: str
    ) -> tuple[StoredFeatures, StoredFeatures]:
        """Return the features of a run and of its reference, computed in common batches."""
        both = self.together(images, reference, device)
        ours, theirs = ({"features": both.arrays[side]} for side in ("images", "reference"))
        return StoredFeatures(ours, both.reused), StoredFeatures(theirs, both.reused)

    def together(self, images: ImageSet, reference: ImageSet, device: str) -> StoredFeatures:
        """Return `images` and `reference` float32 [n, 64], and `distance` float32 [n]."""
        file, sha256 = self.weight.require()
        digest = hash_content(f"{images.digest} {reference.digest}")
        compute = partial(self._compute_pair, images, reference, file, device)
        return load_features(digest, f"{self.name}_pair", sha256, images.indices, compute)

    @torch.inference_mode()
    def _compute_pair(self, images: ImageSet, reference: ImageSet, file: Path, device: str) -> Arrays:
        with loading(self.weights):
            network = SceneFeatures.load(file).to(device)
        parts: dict[str, list[Tensor]] = {"images": [], "reference": [], "distance": []}
        for batch in images.batches(self.batch, self.name):
            # With both sides in one batch, equal images have equal features whatever the kernel.
            both = np.concatenate([images.stack(batch), reference.stack(batch)])
            with full_float32():
                stages = network.stages(to_unit(both, device))
            ours, theirs = zip(*(maps.chunk(2) for maps in stages), strict=True)
            parts["images"].append(ours[-1].mean((2, 3)))
            parts["reference"].append(theirs[-1].mean((2, 3)))
            parts["distance"].append(perceptual_distance(ours, theirs))
        return {name: torch.cat(part).cpu().numpy() for name, part in parts.items()}


@dataclass(frozen=True)
class LpipsScenes(Evaluator):
    """`lpips_scenes`: perceptual distance to the reference on the scenes network."""

    space: Scenes = field(default_factory=Scenes)
    name: ClassVar[str] = "lpips_scenes"
    protocol: ClassVar[str] = "unit"
    needs_reference: ClassVar[bool] = True
    meta_keys: ClassVar[tuple[str, ...]] = ()
    metric: ClassVar[str] = name
    spec: ClassVar[MetricSpec] = MetricSpec("lower")

    def run(self, images: ImageSet, reference: ImageSet | None, device: str) -> Result:
        """Measure the distance of each image to its reference."""
        assert reference is not None
        both = self.space.together(images, reference, device)
        values = both.arrays["distance"].tolist()
        scores = {self.metric: mean_score(values, images.clusters)}
        columns = {"index": images.indices, self.metric: values}
        return finish(self, scores, {"images": both, "reference": both}, columns)
