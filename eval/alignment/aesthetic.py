"""LAION's aesthetic predictor, version 2: linear layers on CLIP's image vectors, fitted to human ratings."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from kvbench.eval.alignment.clip import OPENAI_VIT_L_14, PACKAGES, Clip, read_head, read_state
from kvbench.eval.files.images import ImageSet
from kvbench.eval.files.weights import Weight, loading
from kvbench.eval.networks import full_float32, stack_pictures
from kvbench.eval.protocol.base import Evaluator, Result, make_result
from kvbench.eval.protocol.component import setting
from kvbench.eval.protocol.scores import MetricSpec, mean_score

METRIC = "iqa[laion-aesthetic-v2]"
HEAD = Weight.at(
    "https://github.com/christophschuhmann/improved-aesthetic-predictor/raw/main/sac+logos+ava1-l14-linearMSE.pth"
)


@dataclass(frozen=True)
class Aesthetic(Evaluator):
    """`iqa[laion-aesthetic-v2]`: predicted rating of the image, about 1 to 10, without prompt and reference.

    OpenAI's ViT-L-14 with its own transform (shorter side to 224 pixels, PIL, bicubic, centre crop), unit length, then
    the predictor's linear layers. Float32.

    Attributes:
        path: path of the predictor's file, if it is not in $KVBENCH_WEIGHTS.
        clip_path: path of CLIP's file, if it is neither in $KVBENCH_WEIGHTS nor in CLIP's cache.
        batch: number of images in a batch.
        model: architecture in open_clip.
        head: the predictor's file.
        network: CLIP's file.
    """

    path: str | None = None
    clip_path: str | None = None
    batch: int = setting(32, 1)
    model: str = "ViT-L-14"
    head: Weight = HEAD
    network: Weight = OPENAI_VIT_L_14
    name: ClassVar[str] = "iqa"
    protocol: ClassVar[str] = "laion-aesthetic-v2"
    meta_keys: ClassVar[tuple[str, ...]] = ()
    packages: ClassVar[tuple[str, ...]] = PACKAGES
    metrics: ClassVar[Mapping[str, MetricSpec]] = {METRIC: MetricSpec("higher", digits=3)}

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Files of the predictor and of CLIP."""
        return replace(self.head, path=self.path), replace(self.network, path=self.clip_path)

    def run(self, samples: ImageSet, reference: ImageSet | None, device: str) -> Result:
        """Rate every image; the reference is not used."""
        (head, head_hash), (file, clip_hash) = (weight.require() for weight in self.weights)
        with loading(self.weights):
            clip = Clip(self.model, file, device, quick_gelu=True, scripted=self.network.pinned)
            rate = load_head(head, device)
        values: list[float] = []
        for indices in samples.batches(self.batch, self.name):
            vectors = clip.images(stack_pictures(samples.stack(indices), clip.transform))
            with full_float32():
                values += rate(vectors).tolist()
        hashes = {self.head.file: head_hash, self.network.file: clip_hash}
        scores = {METRIC: mean_score(values, samples.clusters)}
        return make_result(self, scores, {"index": samples.indices, METRIC: values}, hashes)


def load_head(file: Path, device: str) -> Callable[[Tensor], Tensor]:
    """Load the predictor; a ValueError if the file is another one."""
    try:
        return read_head(read_state(file), "layers.", device)
    except KeyError as error:
        lacks = error.args[0]
        raise ValueError(f"{file} does not hold LAION's aesthetic predictor: it has no {lacks}") from None
