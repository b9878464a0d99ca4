"""Space of CLIP's image vectors at 336 pixels, used by CMMD."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

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
            "features": clip.images(resize_normalised(crop_squares(stack), clip.side, MEAN, STD))
        }


def crop_squares(pixels: Pixels) -> Pixels:
    """Return the central squares [N, side, side, 3] of images [N, H, W, 3]; the side is the shorter of H and W."""
    height, width = pixels.shape[1:3]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    return pixels[:, top : top + side, left : left + side]
