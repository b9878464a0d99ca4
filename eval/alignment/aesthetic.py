"""LAION's aesthetic predictor, version 2: linear layers on CLIP's image vectors, fitted to human ratings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvbench.eval.alignment.clip import OPENAI_VIT_L_14, PACKAGES, Clip, read_head, read_state
from kvbench.eval.alignment.prompted import PromptScore, Scorer
from kvbench.eval.files.weights import Weight
from kvbench.eval.networks import Pixels, expecting, full_float32, stack_pictures
from kvbench.eval.protocol.scores import MetricSpec

HEAD = Weight.at(
    "https://github.com/christophschuhmann/improved-aesthetic-predictor/raw/main/sac+logos+ava1-l14-linearMSE.pth"
)


@dataclass(frozen=True)
class Aesthetic(PromptScore):
    """`iqa[laion-aesthetic-v2]`: predicted rating of an image, about 1 to 10, without prompt or reference.

    OpenAI's ViT-L-14 with its own transform (shorter side to 224 pixels, PIL, bicubic, centre crop), unit length, then
    the predictor's linear layers. Arithmetic is in float32.

    Attributes:
        clip_path: path of CLIP's file, if it is neither in $KVBENCH_WEIGHTS nor in CLIP's cache.
        model: architecture in open_clip.
        head: the predictor's file.
        network: CLIP's file.
    """

    clip_path: str | None = None
    model: str = "ViT-L-14"
    head: Weight = HEAD
    network: Weight = OPENAI_VIT_L_14
    name: ClassVar[str] = "iqa"
    protocol: ClassVar[str] = "laion-aesthetic-v2"
    needs_texts: ClassVar[bool] = False
    packages: ClassVar[tuple[str, ...]] = PACKAGES
    paths: ClassVar[Mapping[str, str]] = {"network": "clip_path"}
    spec: ClassVar[MetricSpec] = MetricSpec("higher", digits=3)

    def load(self, device: str) -> tuple[Scorer, Mapping[str, str]]:
        """Load both networks; return their scorer and the hashes of their files."""
        [head, file], hashes = self.require()
        clip = Clip(self.model, file, device, quick_gelu=True, scripted=self.network.pinned)
        with expecting("LAION's aesthetic predictor", head):
            rate = read_head(read_state(head), "layers.", device)

        def score(pixels: Pixels, prompts: Sequence[str]) -> Tensor:  # noqa: ARG001 - other scorers read them
            vectors = clip.images(stack_pictures(pixels, clip.transform))
            with full_float32():
                return rate(vectors)

        return score, hashes
