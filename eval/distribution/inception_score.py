"""Inception Score (Salimans et al., arXiv:1606.03498), in float64."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from kvbench.core.config import Range
from kvbench.eval.distribution.frechet import Features, check_features
from kvbench.eval.files.images import ImageSet
from kvbench.eval.protocol.base import Result
from kvbench.eval.protocol.intervals import SEED
from kvbench.eval.protocol.scores import MetricSpec, jackknife_score
from kvbench.eval.spaces.base import Space
from kvbench.eval.spaces.evaluator import SpaceEvaluator, describe_few_samples, finish, require_samples
from kvbench.eval.spaces.inception import Adm


@dataclass(frozen=True)
class InceptionScore(SpaceEvaluator):
    """`is`: the score as in ADM's evaluator, mean over chunks of 5000 images.

    A shorter last chunk counts by its size; ADM's evaluator counts it like a whole chunk. Images are shuffled because
    chunks of images sorted by class would contain few classes.

    Attributes:
        chunk: number of images in a chunk.
        seed: seed of the shuffle.
    """

    space: Space = field(default_factory=Adm)
    chunk: Annotated[int, Range(2)] = 5000
    seed: int = SEED
    name: ClassVar[str] = "inception_score"
    revision: ClassVar[int] = 1
    metric: ClassVar[str] = "is"
    spec: ClassVar[MetricSpec] = MetricSpec("higher", digits=2)

    def run(self, images: ImageSet, reference: ImageSet | None, device: str) -> Result:
        """Return the score of the images' logits; the reference is not used."""
        require_samples(len(images), 2, "the Inception Score")
        ours = self.space.features(images, device)
        logits = ours.arrays["logits"]
        order = np.random.default_rng(self.seed).permutation(len(logits))

        def score(positions: NDArray[np.int64]) -> float:
            kept = logits[order[np.isin(order, positions)]]
            return average_chunks(inception_score(kept, self.chunk), len(kept), self.chunk)

        scores = {self.metric: jackknife_score(score, images.clusters)}
        return finish(self, scores, {"images": ours}, caveat=describe_few_samples(len(logits)))


def average_chunks(scores: NDArray[np.float64], count: int, chunk: int) -> float:
    """Return the mean of scores [chunks] of `count` rows, where a shorter last chunk counts by its size."""
    if count % chunk == 0:
        return float(scores.mean())
    sizes = np.full(len(scores), chunk)
    sizes[-1] = count % chunk
    return float(np.average(scores, weights=sizes))


def inception_score(logits: Features, chunk: int) -> NDArray[np.float64]:
    """Return exp of the mean KL divergence between p(y | x) and p(y) for each chunk, float64 [chunks].

    Args:
        logits: [n, classes].
        chunk: rows of a chunk; the last chunk may be shorter.

    Raises:
        ValueError: fewer than two rows, or non-finite logits.
    """
    [data] = check_features(logits)
    scores = []
    for part in data.split(chunk):
        log_p = part.log_softmax(1)
        log_marginal = log_p.logsumexp(0) - np.log(len(part))
        scores.append((log_p.exp() * (log_p - log_marginal)).sum(1).mean().exp())
    return torch.stack(scores).numpy()
