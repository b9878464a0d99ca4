"""GenEval's colour classifier: the colour word out of ten that is nearest, in CLIP, to a masked object."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from kvbench.eval.alignment.clip import OPENAI_VIT_L_14, PACKAGES, Clip
from kvbench.eval.files.weights import Weight
from kvbench.eval.geneval.rules import ColorOf, Instance
from kvbench.eval.protocol.component import Component

COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
TEMPLATES = (
    "a photo of a {color} {label}",
    "a photo of a {color}-colored {label}",
    "a photo of a {color} object",
)
BACKGROUND = (0x99, 0x99, 0x99)

Colors = Callable[[NDArray[np.uint8]], ColorOf]


@dataclass(frozen=True)
class Region(Instance):
    """A detected object with its mask.

    Attributes:
        mask: bool [H, W] of the whole image.
    """

    mask: NDArray[np.bool_] = field(kw_only=True)


@dataclass(frozen=True)
class ClipColors(Component):
    """CLIP as GenEval uses it: each colour is the mean of three sentences about an object of the class.

    OpenAI's ViT-L-14, which wants QuickGELU. Float32, where the official program runs under autocast.

    Attributes:
        path: the network's file, if neither in $KVBENCH_WEIGHTS nor in CLIP's cache.
        model: architecture in open_clip.
        network: the file; its hash is checked before it is read.
    """

    path: str | None = None
    model: str = "ViT-L-14"
    network: Weight = OPENAI_VIT_L_14
    packages: ClassVar[tuple[str, ...]] = PACKAGES

    def load(self, device: str) -> tuple[Colors, Mapping[str, str]]:
        """Read the network; return the colour classifier of an image's regions and the hash of the network's file."""
        file, sha256 = replace(self.network, path=self.path).require()
        clip = Clip(self.model, file, device, quick_gelu=True, scripted=self.network.pinned)
        known: dict[str, Tensor] = {}

        def look_at(pixels: NDArray[np.uint8]) -> ColorOf:
            def classify(instances: Sequence[Instance], label: str) -> list[str | None]:
                if label not in known:
                    known[label] = color_vectors(clip, label)
                crops = torch.stack([clip.transform(cut_out(pixels, instance)) for instance in instances])
                nearest = (clip.images(crops) @ known[label].T).argmax(-1)
                return [COLORS[number] for number in nearest.tolist()]

            return classify

        return look_at, {self.network.file: sha256}


def color_vectors(clip: Clip, label: str) -> Tensor:
    """Return a unit vector per colour of objects of a class, [10, D]: the mean over sentences of their unit vectors."""
    sentences = [t.format(color=color, label=label) for color in COLORS for t in TEMPLATES]
    return F.normalize(clip.texts(sentences).unflatten(0, (len(COLORS), len(TEMPLATES))).mean(1), dim=-1)


def cut_out(pixels: NDArray[np.uint8], instance: Instance) -> Image.Image:
    """Return the part of an image inside an object's box, grey wherever its mask is not.

    Raises:
        TypeError: the detector gave no mask.
    """
    if not isinstance(instance, Region):
        raise TypeError(f"colours are read through masks, and {type(instance).__name__} has none")
    kept = np.where(instance.mask[..., None], pixels, np.array(BACKGROUND, np.uint8))
    return Image.fromarray(kept).crop(tuple(round(edge) for edge in instance.box))  # type: ignore[arg-type]
