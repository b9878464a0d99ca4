"""Space of DINOv2's features, used by FD-DINOv2."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvbench.eval.files.weights import TORCH_CACHES, Weight
from kvbench.eval.networks import expecting, resize_normalised
from kvbench.eval.spaces.base import Network, Space

VIT_L_14 = Weight.at(
    "https://dl.fbaipublicfiles.com/dinov2/dinov2_vitl14/dinov2_vitl14_pretrain.pth",
    "d5383ea8f4877b2472eb973e0fd72d557c7da5d3611bd527ceeb1d7162cbf428",
    size=1_217_586_395,
    caches=TORCH_CACHES,
)
MEAN, SD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, of RGB channels in [0, 1]
SIDE, PATCH = 224, 14  # sides of an image and of a patch in pixels
OFFSET = 0.1
"""Number added to the patches per side in the authors' resize of the position table, which shifts its grid."""


@dataclass(frozen=True)
class Dinov2(Space):
    """Class tokens of DINOv2's ViT-L-14 (Oquab et al., arXiv:2304.07193) at 224 pixels.

    As in the code of Stein et al. (arXiv:2306.04675) for Frechet distances, the image is resized to a square (PIL,
    bicubic) and normalised by ImageNet's mean and standard deviation. The position table is resized as by the network's
    authors; timm and transformers resize it differently.

    Attributes:
        model: architecture in timm.
    """

    network: Weight = VIT_L_14
    model: str = "vit_large_patch14_dinov2"
    name: ClassVar[str] = "dinov2"
    distance: ClassVar[str] = "fd"
    packages: ClassVar[tuple[str, ...]] = ("timm",)

    def load(self, file: Path, device: str) -> Network:
        """Return the loaded network, which gives 1024 features per image."""
        network = load_dinov2(self.model, file).to(device)
        return lambda stack: {"features": network(resize_normalised(stack, SIDE, MEAN, SD).to(device))}


def load_dinov2(model: str, file: Path) -> nn.Module:
    """Load the authors' state dict into timm's network for 224 pixels; raise ValueError for another network."""
    import timm

    network: nn.Module = timm.create_model(model, pretrained=False, num_classes=0, img_size=SIDE)
    state: Mapping[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True)
    with expecting(f"a {model}", file):
        inference = {name: value for name, value in state.items() if name != "mask_token"}
        network.load_state_dict({**inference, "pos_embed": resize_positions(state["pos_embed"])})
    return network.eval()


def resize_positions(table: Tensor) -> Tensor:
    """Resize (bicubic) a position table [1, 1 + N, D], class token first, to [1, 257, D] for images of 224 pixels."""
    side, patches = round((table.shape[1] - 1) ** 0.5), SIDE // PATCH
    grid = table[:, 1:].unflatten(1, (side, side)).permute(0, 3, 1, 2)
    resized = F.interpolate(grid, scale_factor=((patches + OFFSET) / side,) * 2, mode="bicubic")
    return torch.cat((table[:, :1], resized.flatten(2).transpose(1, 2)), 1)
