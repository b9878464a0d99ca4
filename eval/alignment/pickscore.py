"""PickScore, a CLIP network tuned to human choices (Kirstain et al., arXiv:2305.01569)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.eval.alignment.clip import PACKAGES
from kvbench.eval.alignment.prompted import PromptScore, Scorer
from kvbench.eval.files.weights import Snapshot
from kvbench.eval.networks import Pixels, full_float32, load_pretrained, stack_pictures
from kvbench.eval.protocol.scores import MetricSpec

ARCHITECTURE = "ViT-H-14"
"""Base network of open_clip, whose tokenizer and image transform are used."""
PICKSCORE = Snapshot("yuvalkirstain/PickScore_v1", ("config.json", "model.safetensors"))


@dataclass(frozen=True)
class PickScore(PromptScore):
    """`pickscore`: cosine between image and prompt times the network's scale, about 100, as in the official code.

    The shorter side is resized to 224 pixels (PIL, bicubic) and the centre is cropped. Arithmetic is in float32.
    Scores of different prompts are not comparable: use the differences to the reference's scores.

    Attributes:
        model: files of the folder.
    """

    model: Snapshot = PICKSCORE
    name: ClassVar[str] = "pickscore"
    protocol: ClassVar[str] = "v1"
    metric: ClassVar[str] = "pickscore"
    packages: ClassVar[tuple[str, ...]] = ("transformers", *PACKAGES)
    spec: ClassVar[MetricSpec] = MetricSpec("higher", digits=2)

    def load(self, device: str) -> tuple[Scorer, Mapping[str, str]]:
        """Load the network; return its scorer and the hashes of its files."""
        [folder], hashes = self.require()
        return load_scorer(folder, device), hashes


def load_scorer(folder: Path, device: str) -> Scorer:
    """Load the network from local files; raise ValueError if weights are missing."""
    import open_clip
    from transformers import CLIPModel

    network = load_pretrained(CLIPModel, folder, device)
    tokenize = open_clip.get_tokenizer(ARCHITECTURE)
    transform = open_clip.image_transform(network.config.vision_config.image_size, is_train=False)

    @torch.inference_mode()
    def score(pixels: Pixels, texts: Sequence[str]) -> Tensor:
        pictures = stack_pictures(pixels, transform).to(device)
        with full_float32():
            outputs = network(input_ids=tokenize(list(texts)).to(device), pixel_values=pictures)
            cosines: Tensor = (outputs.image_embeds * outputs.text_embeds).sum(-1)
            return network.logit_scale.exp() * cosines

    return score
