"""PickScore, a CLIP network tuned to what people picked (Kirstain et al., arXiv:2305.01569)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from kvbench.eval.alignment.clip import PACKAGES, Scorer, check_texts, score_prompted
from kvbench.eval.files.images import ImageSet
from kvbench.eval.files.weights import Snapshot
from kvbench.eval.protocol.base import Result, make_result
from kvbench.eval.protocol.scores import MetricSpec, mean_score
from kvbench.eval.spaces.base import check_minimum
from kvbench.eval.spaces.float32 import full_float32
from kvbench.eval.spaces.pretrained import load_pretrained

ARCHITECTURE = "ViT-H-14"
"""What it was tuned from; its tokenizer and its transform are used."""
PICKSCORE = Snapshot("yuvalkirstain/PickScore_v1", ("config.json", "model.safetensors"))


@dataclass(frozen=True)
class PickScore:
    """`pickscore`: cosine between image and prompt times the network's own scale, about 100, as its authors score.

    The shorter side is resized to 224 pixels (PIL, bicubic) and the middle cut out. Float32. Scores of different
    prompts do not compare: look at differences to the reference's scores.

    Attributes:
        path: the model's folder, if neither in $KVBENCH_WEIGHTS nor in the Hub's cache.
        batch: images at a time.
        model: the folder's files.
    """

    path: str | None = None
    batch: int = 32
    model: Snapshot = PICKSCORE
    name: ClassVar[str] = "pickscore"
    protocol: ClassVar[str] = "v1"
    needs_reference: ClassVar[bool] = False
    packages: ClassVar[tuple[str, ...]] = ("transformers", *PACKAGES)
    metrics: ClassVar[Mapping[str, MetricSpec]] = {"pickscore": MetricSpec("higher", digits=2)}

    def __post_init__(self) -> None:
        check_minimum("batch", self.batch, 1)

    @property
    def weights(self) -> tuple[Snapshot, ...]:
        """The model's folder."""
        return (replace(self.model, path=self.path),)

    def run(self, images: ImageSet, reference: ImageSet | None, device: str) -> Result:
        """Score every image; the reference is not looked at."""
        check_texts(images)
        folder, hashes = self.weights[0].require()
        score = load_scorer(folder, device)
        values = score_prompted(images, score, self.batch, self.name)
        scores = {"pickscore": mean_score(values, images.clusters)}
        return make_result(self, scores, {"index": images.indices, "pickscore": values}, hashes)


def load_scorer(folder: Path, device: str) -> Scorer:
    """Read the network, from local files only.

    Raises:
        ValueError: the folder lacks weights.
    """
    import open_clip
    from transformers import CLIPModel

    network = load_pretrained(CLIPModel, folder, device)
    tokenize = open_clip.get_tokenizer(ARCHITECTURE)
    transform = open_clip.image_transform(network.config.vision_config.image_size, is_train=False)

    @torch.inference_mode()
    def score(pixels: NDArray[np.uint8], texts: Sequence[str]) -> list[float]:
        pictures = torch.stack([transform(Image.fromarray(image)) for image in pixels]).to(device)
        with full_float32():
            found = network(input_ids=tokenize(list(texts)).to(device), pixel_values=pictures)
            cosines = (found.image_embeds * found.text_embeds).sum(-1)
        values: list[float] = (network.logit_scale.exp() * cosines).tolist()
        return values

    return score
