"""GenEval's colour classifier: the colour word, one of ten, with the largest CLIP similarity to a masked object."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from kvbench.eval.alignment.clip import OPENAI_VIT_L_14, PACKAGES, Clip
from kvbench.eval.files.weights import Weight
from kvbench.eval.geneval.rules import ColorOf, Instance, MaskedInstance
from kvbench.eval.networks import Pixels
from kvbench.eval.protocol.component import Component

COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
TEMPLATES = (
    "a photo of a {color} {label}",
    "a photo of a {color}-colored {label}",
    "a photo of a {color} object",
)
BACKGROUND = (0x99, 0x99, 0x99)  # RGB outside an object's mask

Colors = Callable[[Pixels], ColorOf]


@dataclass(frozen=True)
class ClipColors(Component):
    """CLIP as in GenEval: the vector of a colour is the mean over three sentences about an object of the class.

    OpenAI's ViT-L-14 with QuickGELU in float32; the official code uses autocast.

    Attributes:
        path: path of the network's file, if it is neither in $KVBENCH_WEIGHTS nor in CLIP's cache.
        model: architecture in open_clip.
        network: the network's file.
    """

    path: str | None = None
    model: str = "ViT-L-14"
    network: Weight = OPENAI_VIT_L_14
    packages: ClassVar[tuple[str, ...]] = PACKAGES

    def load(self, device: str) -> tuple[Colors, Mapping[str, str]]:
        """Load the network; return a function from an image to its colour classifier, and the hash of the file."""
        [file], hashes = self.require()
        clip = Clip(self.model, file, device, quick_gelu=True, scripted=self.network.pinned)
        vectors: dict[str, Tensor] = {}

        def make_classifier(pixels: Pixels) -> ColorOf:
            def classify(instances: Sequence[Instance], label: str) -> list[str | None]:
                if label not in vectors:
                    vectors[label] = color_vectors(clip, label)
                crops = torch.stack([clip.transform(cut_out(pixels, instance)) for instance in instances])
                nearest = (clip.images(crops) @ vectors[label].T).argmax(-1)
                return [COLORS[index] for index in nearest.tolist()]

            return classify

        return make_classifier, hashes


def color_vectors(clip: Clip, label: str) -> Tensor:
    """Return the unit vector of each colour for objects of a class, float32 [10, D]: the mean over sentences."""
    sentences = [t.format(color=color, label=label) for color in COLORS for t in TEMPLATES]
    return F.normalize(clip.texts(sentences).unflatten(0, (len(COLORS), len(TEMPLATES))).mean(1), dim=-1)


def cut_out(pixels: Pixels, instance: Instance) -> Image.Image:
    """Return the part of an image in an object's box, grey outside its mask; raise TypeError if it has no mask."""
    if not isinstance(instance, MaskedInstance):
        raise TypeError(f"colours need masks, and {type(instance).__name__} has none")
    masked = np.where(instance.mask[..., None], pixels, np.array(BACKGROUND, np.uint8))
    return Image.fromarray(masked).crop(tuple(round(edge) for edge in instance.box))  # type: ignore[arg-type]
