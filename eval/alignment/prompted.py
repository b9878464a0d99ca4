"""Base class of metrics that score each image with its prompt."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import Tensor

from kvbench.core.config import Range
from kvbench.eval.files.images import ImageSet
from kvbench.eval.files.weights import loading
from kvbench.eval.networks import Pixels
from kvbench.eval.protocol.base import Evaluator, Result, SkipEvaluation, make_result
from kvbench.eval.protocol.intervals import are_classes
from kvbench.eval.protocol.scores import mean_score, score_parts

Scorer = Callable[[Pixels, Sequence[str]], Tensor]
"""Function that returns scores [N] of images uint8 [N, H, W, 3] with one prompt each."""


@dataclass(frozen=True)
class PromptScore(Evaluator):
    """Base class of mean scores of images, mostly with their prompts; a subclass implements `load`.

    Attributes:
        path: path of the network's file or folder, if it is neither in $KVBENCH_WEIGHTS nor in a library's cache.
        batch: number of images in a batch.
        needs_texts: whether the network reads the prompts.
        part_key: metadata key and column of the name of an image's part, one of `part_names`; empty without parts.
    """

    path: str | None = None
    batch: Annotated[int, Range(1)] = 32
    meta_keys: ClassVar[tuple[str, ...]] = ()
    needs_texts: ClassVar[bool] = True
    part_key: ClassVar[str] = ""

    @abstractmethod
    def load(self, device: str) -> tuple[Scorer, Mapping[str, str]]:
        """Load the network; return a scorer of images, and the hashes of the files by name."""

    def run(self, samples: ImageSet, reference: ImageSet | None, device: str) -> Result:
        """Score every image; the reference is not used."""
        if self.needs_texts:
            check_texts(samples)
        with loading(self.weights):
            score, hashes = self.load(device)
        values: list[float] = []
        for indices in samples.batches(self.batch, self.name):
            prompts = [samples.samples[index].prompt for index in indices]
            values += score(samples.stack(indices), prompts).tolist()
        scores = {self.metric: mean_score(values, samples.clusters)}
        columns: dict[str, Sequence[object]] = {"index": samples.indices}
        if self.part_key:
            parts = [str(samples.meta(index).get(self.part_key, "")) for index in samples.indices]
            graded = zip(parts, values, samples.clusters, strict=True)
            scores |= score_parts(self.metric, self.part_names, graded, mean_score)
            columns[self.part_key] = parts
        return make_result(self, scores, {**columns, self.metric: values}, hashes)


def check_texts(images: ImageSet) -> None:
    """Raise a SkipEvaluation if prompts are class numbers, unknown, or were rewritten for the model."""
    if images.rewritten:
        raise SkipEvaluation("the prompts were rewritten for the model: it is ambiguous which text to score")
    if not all(sample.prompt for sample in images.samples.values()):
        raise SkipEvaluation("the images have no prompts, and texts are needed (--prompts)")
    if are_classes(images.clusters):
        raise SkipEvaluation("the prompts are class numbers, and texts are needed")
