"""HPSv2.1, a CLIP network tuned to human preferences (Wu et al., arXiv:2306.09341)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.eval.alignment.clip import PACKAGES, Clip, cosines
from kvbench.eval.alignment.prompted import PromptScore, Scorer
from kvbench.eval.files.weights import Weight
from kvbench.eval.networks import Pixels, normalise
from kvbench.eval.protocol.scores import MetricSpec

MEAN = (0.48145466, 0.4578275, 0.40821073)  # CLIP's normalisation of RGB channels in [0, 1]
STD = (0.26862954, 0.26130258, 0.27577711)  # standard deviations of the channels
STYLES = ("anime", "concept-art", "paintings", "photo")
HPS_V2_1 = Weight.at("https://huggingface.co/xswu/HPSv2/resolve/main/HPS_v2.1_compressed.pt")


def preprocess(image: Pixels, side: int, *, antialias: bool) -> Tensor:
    """Return an image as the official code transforms it, float32 [3, side, side].

    The longer side is resized to `side` (bicubic, on float values) and the image is padded to a square. Unlike in
    open_clip, nothing is cropped, the padding is black before normalisation, and values are not clipped.

    Args:
        image: uint8 [H, W, 3].
        side: pixels of the square.
        antialias: widen the filter when shrinking, as torchvision does from 0.17 on.
    """
    pixels = torch.from_numpy(image).permute(2, 0, 1)[None].float() / 255
    scale = side / max(pixels.shape[-2:])
    height, width = (round(length * scale) for length in pixels.shape[-2:])
    if scale != 1:
        pixels = F.interpolate(pixels, (height, width), mode="bicubic", antialias=antialias)
    left, top = (side - width) // 2, (side - height) // 2
    pixels = F.pad(pixels, (left, side - width - left, top, side - height - top))[0]
    return normalise(pixels, MEAN, STD)


@dataclass(frozen=True)
class Hps(PromptScore):
    """`hpsv2.1`: 100 x cosine between image and prompt, as a mean over all images and over each style's images.

    Float32; the official code rounds to steps of 0.02. Scores of different prompts are not comparable: use the
    differences to the reference's scores.

    Attributes:
        sha256: required hash of the file; the authors publish none, so None only records the hash.
        antialias: antialias the resize; false is as in the official code before torchvision 0.17.
        model: architecture in open_clip.
        network: the network's file.
    """

    sha256: str | None = None
    antialias: bool = True
    model: str = "ViT-H-14"
    network: Weight = HPS_V2_1
    name: ClassVar[str] = "hpsv2"
    protocol: ClassVar[str] = "v2.1"
    packages: ClassVar[tuple[str, ...]] = PACKAGES
    metric: ClassVar[str] = "hpsv2.1"
    part_key: ClassVar[str] = "style"
    part_names: ClassVar[tuple[str, ...]] = STYLES
    meta_keys: ClassVar[tuple[str, ...]] = (part_key,)
    spec: ClassVar[MetricSpec] = MetricSpec("higher", digits=2)

    @property
    def files(self) -> tuple[Weight, ...]:
        """File of the network, with the required hash."""
        return (replace(self.network, path=self.path, sha256=self.sha256 or self.network.sha256),)

    def load(self, device: str) -> tuple[Scorer, Mapping[str, str]]:
        """Load the network; return its scorer and the hashes of its files."""
        [file], hashes = self.require()
        clip = Clip(self.model, file, device, quick_gelu=False, scripted=self.files[0].pinned)

        def score(pixels: Pixels, prompts: Sequence[str]) -> Tensor:
            pictures = [preprocess(image, clip.side, antialias=self.antialias) for image in pixels]
            return 100 * cosines(clip, torch.stack(pictures), prompts)

        return score, hashes
