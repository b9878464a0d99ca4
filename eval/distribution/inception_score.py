"""Inception Score (Salimans et al., arXiv:1606.03498), in float64."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from kvbench.eval.distribution.frechet import Features, checked
from kvbench.eval.files.images import ImageSet
from kvbench.eval.protocol.base import Result
from kvbench.eval.protocol.component import setting
from kvbench.eval.protocol.intervals import SEED
from kvbench.eval.protocol.scores import MetricSpec, jackknife_score
from kvbench.eval.spaces.base import Adm, Space, SpaceEvaluator, few_samples, finish, require_samples


@dataclass(frozen=True)
class InceptionScore(SpaceEvaluator):
    """`is`: the score as the ADM evaluator has it, mean over chunks of 5000 images.

    Images are shuffled first, by seed: chunks of images sorted by class would see few classes each.

    Attributes:
        chunk: images of a chunk.
        seed: of the shuffle.
    """

    space: Space = field(default_factory=Adm)
    chunk: int = setting(5000, 2)
    seed: int = SEED
    name: ClassVar[str] = "inception_score"
    metrics: ClassVar[Mapping[str, MetricSpec]] = {"is": MetricSpec("higher", digits=2)}

    def run(self, images: ImageSet, reference: ImageSet | None, device: str) -> Result:
        """Logits of the images, then the score."""
        require_samples(len(images), 2, "the Inception Score")
        ours = self.space.features(images, device)
        logits = ours.arrays["logits"]
        order = np.random.default_rng(self.seed).permutation(len(logits))

        def score(kept: NDArray[np.int64]) -> float:
            return float(inception_score(logits[order[np.isin(order, kept)]], self.chunk).mean())

        scores = {"is": jackknife_score(score, images.clusters)}
        return finish(self, scores, {"images": ours}, few_samples(len(logits)))


def inception_score(logits: Features, chunk: int) -> NDArray[np.float64]:
    """The exponential of the mean divergence between p(y | x) and p(y), in consecutive chunks.

    Args:
        logits: [n, classes].
        chunk: rows of a chunk; the last may be shorter.

    Returns:
        One score per chunk, float64.

    Raises:
        ValueError: fewer than two rows, or logits that are not finite.
    """
    [data] = checked(logits)
    found = []
    for part in data.split(chunk):
        log_p = part.log_softmax(1)
        log_marginal = log_p.logsumexp(0) - np.log(len(part))
        found.append((log_p.exp() * (log_p - log_marginal)).sum(1).mean().exp())
    return torch.stack(found).numpy()
