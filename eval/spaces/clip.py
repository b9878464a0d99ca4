"""Space of CLIP's image vectors at 336 pixels, used by CMMD."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from PIL import Image
from torch import Tensor

from kvbench.eval.alignment.clip import PACKAGES, Clip
from kvbench.eval.alignment.hps import MEAN, STD
from kvbench.eval.files.weights import Weight
from kvbench.eval.networks import Pixels, resize_normalised
from kvbench.eval.spaces.base import Network, Space

OPENAI_VIT_L_14_336 = Weight.at(
    "https://openaipublic.azureedge.net/clip/models/"
    "3035c92b350959924f9f00213499208652fc7ea050643e8b385c2dac08641f02/ViT-L-14-336px.pt",
    "3035c92b350959924f9f00213499208652fc7ea050643e8b385c2dac08641f02",
    caches=("~/.cache/clip",),
)


@dataclass(frozen=True)
class ClipImages(Space):
    """Unit image vectors of OpenAI's ViT-L-14 at 336 pixels (Radford et al., arXiv:2103.00020).

    The centre is cropped to a square and then resized (PIL, bicubic), as by CMMD's authors; CLIP resizes first.

    Attributes:
        model: architecture in open_clip.
    """

    network: Weight = OPENAI_VIT_L_14_336
    model: str = "ViT-L-14-336"
    name: ClassVar[str] = "clip336"
    packages: ClassVar[tuple[str, ...]] = PACKAGES

    def load(self, file: Path, device: str) -> Network:
        """Return the loaded network, which gives 768 features per image."""
        clip = Clip(self.model, file, device, quick_gelu=True, scripted=self.network.pinned)
        return lambda stack: {
            "features": clip.images(torch.stack([crop_square(image, clip.side) for image in stack]))
        }


def crop_square(image: Pixels, side: int) -> Tensor:
    """Return the central square of uint8 [H, W, 3], resized and normalised for CLIP: float32 [3, side, side]."""
    height, width = image.shape[:2]
    shorter = min(height, width)
    top, left = (height - shorter) // 2, (width - shorter) // 2
    square = Image.fromarray(image[top : top + shorter, left : left + shorter])
    return resize_normalised(square, side, MEAN, STD)
