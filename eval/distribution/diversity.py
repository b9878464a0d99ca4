"""Diversity of the images of one prompt: Vendi score and mean pairwise distance."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kvbench.eval.files.images import ImageSet
from kvbench.eval.protocol.base import Result, SkipEvaluation
from kvbench.eval.protocol.component import setting
from kvbench.eval.protocol.scores import MetricSpec, mean_score
from kvbench.eval.spaces.base import SpaceEvaluator, finish

SMALLEST = 1e-12
"""Eigenvalues up to this are rounding errors of zero."""


@dataclass(frozen=True)
class Diversity(SpaceEvaluator):
    """`diversity[<space>]` and `vendi[<space>,n=<images>]`: how much the images of one prompt differ from each other.

    Both are computed for each prompt on features of unit length, then averaged over prompts. `diversity` is the mean
    of 1 - cosine over all pairs of images, and its expectation does not depend on how many there are. The Vendi score
    does, so that number is in its name. More diverse is not better by itself: read both beside a metric of quality.

    Attributes:
        per_prompt: images of a prompt. It is taken from the run: the smallest number of images that a prompt has. A
            prompt with more is split into groups of that many, in the order of its samples.
    """

    per_prompt: int = setting(4, 2)
    name: ClassVar[str] = "diversity"

    @property
    def metrics(self) -> Mapping[str, MetricSpec]:
        """The mean distance and the mean Vendi score."""
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
        """Measure every prompt; the reference is not used."""
        prompts = _group_by_prompt(samples)
        if min(map(len, prompts.values())) < 2:
            raise SkipEvaluation("a prompt has a single image: generate several with prompts.per_prompt=4")
        held = self.space.features(samples, device)
        features = held.arrays["features"]
        groups = [group for members in prompts.values() for group in split(members, self.per_prompt)]
        columns: dict[str, list[float]] = {name: [] for name in self.metrics}
        for group in groups:
            found = (mean_distance(features[group]), vendi_score(features[group]))
            for column, value in zip(columns.values(), found, strict=True):
                column.append(value)
        clusters = [samples.clusters[group[0]] for group in groups]
        scores = {name: mean_score(values, clusters) for name, values in columns.items()}
        over = len(samples) - len(groups) * self.per_prompt
        caveat = f"{over} images are left over from groups of {self.per_prompt}" if over else None
        result = finish(self, scores, {"images": held}, caveat)
        result.samples = {"index": [samples.indices[group[0]] for group in groups], **columns}
        return result


def split(members: Sequence[int], size: int) -> list[list[int]]:
    """Return consecutive groups of `size` members; the rest, fewer than that, is left out."""
    whole = len(members) // size
    return [list(members[number * size : (number + 1) * size]) for number in range(whole)]


def vendi_score(features: NDArray[np.floating], order: float = 1) -> float:
    """Return the effective number of different rows, from 1 to n (Friedman and Dieng, arXiv:2210.02410, eq. 3).

    Args:
        features: [n, D], any length.
        order: q of the Renyi entropy of the eigenvalues of their cosines over n; infinity counts the largest alone.
    """
    unit = _unit_rows(features)
    gram = unit @ unit.T if len(unit) <= unit.shape[1] else unit.T @ unit
    found = np.linalg.eigvalsh(gram / len(unit))
    eigenvalues = found[found > SMALLEST]
    if order == 1:
        return float(np.exp(-(eigenvalues * np.log(eigenvalues)).sum()))
    if np.isinf(order):
        return float(1 / eigenvalues.max())
    return float((eigenvalues**order).sum() ** (1 / (1 - order)))


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
    """Return the positions of each prompt's images, in order."""
    prompts: dict[str, list[int]] = {}
    for position, prompt in enumerate(samples.clusters):
        prompts.setdefault(prompt, []).append(position)
    return prompts
