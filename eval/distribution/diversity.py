"""Diversity of the images of one prompt: Vendi score (Friedman and Dieng) and mean pairwise distance."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray

from kvbench.core.config import Range
from kvbench.eval.files.images import ImageSet
from kvbench.eval.files.samples import group_indices
from kvbench.eval.protocol.base import Result, SkipEvaluation
from kvbench.eval.protocol.scores import MetricSpec, mean_score
from kvbench.eval.spaces.evaluator import SpaceEvaluator, finish

MIN_EIGENVALUE = 1e-12
"""Eigenvalues below this are treated as zero."""


@dataclass(frozen=True)
class Diversity(SpaceEvaluator):
    """`diversity[<space>]` and `vendi[<space>,n=<images>]`: differences between the images of one prompt.

    Both are computed for each prompt on features of unit length, then averaged over prompts. `diversity` is the mean
    of 1 - cosine over all pairs of images. The Vendi score depends on the number of images, which is in its name. More
    diversity alone is not better: compare a metric of quality as well.

    Attributes:
        per_prompt: number of images per group, set by `adapt` to the minimum over prompts. Prompts with more images are
            split into groups, in the order of their samples.
    """

    per_prompt: Annotated[int, Range(2)] = 4
    name: ClassVar[str] = "diversity"

    @property
    def metrics(self) -> Mapping[str, MetricSpec]:
        """Specifications of mean distance and mean Vendi score."""
        space = self.space.name
        return {
            f"diversity[{space}]": MetricSpec("higher"),
            f"vendi[{space},n={self.per_prompt}]": MetricSpec("higher", "images", digits=3),
        }

    def adapt(self, samples: ImageSet) -> "Diversity":
        """Return the evaluator for the run's number of images per prompt."""
        smallest = min(map(len, _group_by_prompt(samples).values()))
        return replace(self, per_prompt=smallest) if smallest > 1 else self

    def run(self, samples: ImageSet, reference: ImageSet | None, device: str) -> Result:
        """Return mean distance and Vendi score of each prompt's images; the reference is not used."""
        prompts = _group_by_prompt(samples)
        if min(map(len, prompts.values())) < 2:
            raise SkipEvaluation("a prompt has a single image: generate several with prompts.per_prompt=4")
        stored = self.space.features(samples, device)
        features = stored.arrays["features"]
        groups = [group for members in prompts.values() for group in split(members, self.per_prompt)]
        columns: dict[str, list[float]] = {name: [] for name in self.metrics}
        for group in groups:
            pair = (mean_distance(features[group]), vendi_score(features[group]))
            for column, value in zip(columns.values(), pair, strict=True):
                column.append(value)
        clusters = [samples.clusters[group[0]] for group in groups]
        scores = {name: mean_score(values, clusters) for name, values in columns.items()}
        over = len(samples) - len(groups) * self.per_prompt
        caveat = f"{over} images are left over from groups of {self.per_prompt}" if over else None
        first = [samples.indices[group[0]] for group in groups]
        return finish(self, scores, {"images": stored}, {"index": first, **columns}, caveat)


def split(members: Sequence[int], size: int) -> list[list[int]]:
    """Return consecutive groups of `size` members, without the remainder."""
    return [list(members[stop - size : stop]) for stop in range(size, len(members) + 1, size)]


def vendi_score(features: NDArray[np.floating]) -> float:
    """Return the effective number of different rows of features [n, D], from 1 to n (arXiv:2210.02410, eq. 3).

    It is exp of the entropy of the eigenvalues of the rows' cosine matrix over n.
    """
    unit = _unit_rows(features)
    gram = unit @ unit.T if len(unit) <= unit.shape[1] else unit.T @ unit
    eigenvalues = np.linalg.eigvalsh(gram / len(unit))
    eigenvalues = eigenvalues[eigenvalues > MIN_EIGENVALUE]
    return float(np.exp(-(eigenvalues * np.log(eigenvalues)).sum()))


def mean_distance(features: NDArray[np.floating]) -> float:
    """Return the mean of 1 - cosine over all pairs of two or more rows of features [n, D]."""
    unit = _unit_rows(features)
    first, second = np.triu_indices(len(unit), 1)
    return float((np.square(unit[first] - unit[second]).sum(1) / 2).mean())


def _unit_rows(features: NDArray[np.floating]) -> NDArray[np.float64]:
    rows = features.astype(np.float64)
    unit: NDArray[np.float64] = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return unit


def _group_by_prompt(samples: ImageSet) -> dict[str, list[int]]:
    """Return the positions of each prompt's images."""
    return group_indices(range(len(samples)), samples.clusters)
