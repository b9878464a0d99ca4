"""DISTS: structure and texture similarity on VGG16."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvbench.core.config import Range
from kvbench.eval.files.weights import TORCH_CACHES, Weight
from kvbench.eval.networks import expecting, to_unit
from kvbench.eval.paired.base import Measure, PairedScore
from kvbench.eval.protocol.scores import MetricSpec

STAGES = [3, 64, 128, 256, 512, 512]
"""Channels of the images and of the last map of each block."""
STABILISER = 1e-6  # the paper's constants c1 and c2
MEAN, SD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, of RGB channels in [0, 1]

VGG16 = Weight.at(
    "https://download.pytorch.org/models/vgg16-397923af.pth",
    "397923af8e79cdbb6a7127f12361acd7a2f83e06b05044ddf496e83de57a5bf0",
    caches=TORCH_CACHES,
)
MIXTURE = Weight(
    "weights.pt",
    sha256="f5e65c96230b7f6ca995691647d482237e4cab8a50c5c4a5784f219ef0748218",
    how="It ships with torchmetrics: install torchmetrics again",
    path="pkg://torchmetrics/functional/image/dists_models/weights.pt",
)


@dataclass(frozen=True)
class Dists(PairedScore):
    """`dists`: deep image structure and texture similarity (Ding et al., arXiv:2004.07728), as a distance.

    The images keep their size; the official code first shrinks the shorter side to 256 pixels. The network is built
    here because torchmetrics does not check VGG16's file; the weights of channels ship with torchmetrics.

    Attributes:
        path: path of VGG16's file, if it is neither in $KVBENCH_WEIGHTS nor in torch's cache.
        trunk: VGG16's file.
    """

    path: str | None = None
    batch: Annotated[int, Range(1)] = 4
    trunk: Weight = VGG16
    name: ClassVar[str] = "dists"
    revision: ClassVar[int] = 1
    protocol: ClassVar[str] = "vgg16"
    packages: ClassVar[tuple[str, ...]] = ("torchmetrics", "torchvision")
    metric: ClassVar[str] = name
    spec: ClassVar[MetricSpec] = MetricSpec("lower")

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Files of VGG16 and of its channels' weights."""
        return (replace(self.trunk, path=self.path), MIXTURE)

    def load(self, device: str) -> tuple[Measure, Mapping[str, str]]:
        """Return the loaded measure and the hashes of its files."""
        files = [weight.require() for weight in self.weights]
        network = DistsNetwork.load(*(file for file, _ in files)).to(device)
        hashes = {file.name: sha256 for file, sha256 in files}
        return lambda a, b: [network(to_unit(a, device), to_unit(b, device))], hashes


class DistsNetwork(nn.Module):
    """VGG16 with L2 pooling (eq. 2 of the paper), and the weights alpha and beta of eq. 6."""

    features: nn.Sequential
    window: Tensor
    mean: Tensor
    sd: Tensor

    def __init__(self, alpha: Tensor, beta: Tensor) -> None:
        from torchvision.models.vgg import cfgs, make_layers

        super().__init__()
        self.features = make_layers(cfgs["D"])
        total = alpha.sum() + beta.sum()
        self.alpha = (alpha.flatten() / total).split(STAGES)
        self.beta = (beta.flatten() / total).split(STAGES)
        taps = torch.tensor([1.0, 2.0, 1.0]) / 4
        self.register_buffer("window", taps[:, None] * taps)
        self.register_buffer("mean", torch.tensor(MEAN)[:, None, None])
        self.register_buffer("sd", torch.tensor(SD)[:, None, None])

    @classmethod
    def load(cls, trunk: Path, mixture: Path) -> "DistsNetwork":
        """Load torchvision's VGG16 state dict and torchmetrics' mixture; raise ValueError for another network."""
        mixed = torch.load(mixture, map_location="cpu", weights_only=True)
        state = torch.load(trunk, map_location="cpu", weights_only=True)
        network = cls(mixed["alpha"], mixed["beta"])
        with expecting("a VGG16 state dict", trunk):
            layers = {name: state[f"features.{name}"] for name in network.features.state_dict()}
            network.features.load_state_dict(layers)
        return network.eval()

    def stages(self, images: Tensor) -> list[Tensor]:
        """Return the images [N, 3, H, W] in [0, 1] themselves, followed by the last map of each block."""
        maps, x = [images], (images - self.mean) / self.sd
        for layer in self.features:
            if isinstance(layer, nn.MaxPool2d):
                maps.append(x)
                window = self.window.expand(x.shape[1], 1, 3, 3)
                x = (F.conv2d(x.square(), window, stride=2, padding=1, groups=x.shape[1]) + 1e-12).sqrt()
            else:
                x = layer(x)
        return maps

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """Return distances [N] of images [N, 3, H, W] in [0, 1], 0 for equal images (eqs. 4 to 6)."""
        similarity = torch.zeros(len(first), device=first.device)
        for x, y, alpha, beta in zip(
            self.stages(first), self.stages(second), self.alpha, self.beta, strict=True
        ):
            mean_x, mean_y = (m.mean((2, 3), keepdim=True) for m in (x, y))
            var_x, var_y = ((m - mean).square().mean((2, 3)) for m, mean in ((x, mean_x), (y, mean_y)))
            cov = ((x - mean_x) * (y - mean_y)).mean((2, 3))
            mean_x, mean_y = mean_x[..., 0, 0], mean_y[..., 0, 0]
            texture = (2 * mean_x * mean_y + STABILISER) / (mean_x.square() + mean_y.square() + STABILISER)
            structure = (2 * cov + STABILISER) / (var_x + var_y + STABILISER)
            similarity += texture @ alpha.to(first.device) + structure @ beta.to(first.device)
        return 1 - similarity
