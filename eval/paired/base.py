"""Base class of metrics that compare each image with its reference."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch

from kvbench.core.config import Range
from kvbench.eval.files.images import ImageSet
from kvbench.eval.files.weights import loading
from kvbench.eval.networks import Pixels, full_float32
from kvbench.eval.protocol.base import Evaluator, Result, SkipEvaluation, make_result
from kvbench.eval.protocol.scores import mean_score

Measure = Callable[[Pixels, Pixels], Sequence[torch.Tensor]]
"""Function from two batches of images uint8 [N, H, W, 3] to the values [N] of each metric."""


@dataclass(frozen=True)
class PairedScore(Evaluator):
    """Base class of means over pairs of images; a subclass implements `load`.

    Attributes:
        batch: number of pairs in a batch.
        min_side: minimum length of the shorter side in pixels, and the reason for it.
    """

    batch: Annotated[int, Range(1)] = 8
    needs_reference: ClassVar[bool] = True
    meta_keys: ClassVar[tuple[str, ...]] = ()
    min_side: ClassVar[tuple[int, str]] = (0, "")

    @abstractmethod
    def load(self, device: str) -> tuple[Measure, Mapping[str, str]]:
        """Return a function that measures pairs of images, and the hashes of the files by name."""

    def run(self, samples: ImageSet, reference: ImageSet | None, device: str) -> Result:
        """Return the value of every pair and the mean over pairs."""
        assert reference is not None
        side, need = self.min_side
        indices = [index for index, sample in samples.samples.items() if min(sample.size) >= side]
        count = len(samples) - len(indices)
        caveat = f"{count} of {len(samples)} images are smaller than {side} pixels, which {need} need"
        if not indices:
            raise SkipEvaluation(caveat)
        with loading(self.weights):
            measure, hashes = self.load(device)
        columns: dict[str, list[float]] = {name: [] for name in self.metrics}
        with torch.inference_mode(), full_float32():
            for batch in samples.batches(self.batch, self.name, indices):
                results = measure(samples.stack(batch), reference.stack(batch))
                for column, values in zip(columns.values(), results, strict=True):
                    column += values.tolist()
        prompts = [samples.samples[index].cluster for index in indices]
        scores = {name: mean_score(values, prompts) for name, values in columns.items()}
        return make_result(self, scores, {"index": indices, **columns}, hashes, caveat if count else None)
