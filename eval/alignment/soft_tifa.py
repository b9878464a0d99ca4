"""Soft-TIFA of GenEval2 (Kamath et al., arXiv:2512.16853): probabilities of right answers about an image."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kvbench.eval.files.images import ImageSet
from kvbench.eval.protocol.base import PartedEvaluator, Result, make_result
from kvbench.eval.protocol.intervals import Interval, bootstrap
from kvbench.eval.protocol.scores import MetricSpec, Score, mean_score


@dataclass(frozen=True)
class Atom:
    """One question about an image.

    Attributes:
        question: the question.
        answer: its right answer, `Yes` or a number as a word.
        skill: skill that it tests, such as `count`.
    """

    question: str
    answer: str
    skill: str


@dataclass(frozen=True)
class Questions:
    """The questions about the images of one prompt.

    Attributes:
        atoms: one or more questions.
        atomicity: number of atoms by the benchmark's own count, which may leave some questions out.
    """

    atoms: tuple[Atom, ...]
    atomicity: int


Grade = Callable[[NDArray[np.uint8], Sequence[Atom]], Sequence[float]]
"""Probability, from 0 to 1, of the right answer to each question about an image uint8 [H, W, 3]."""


class SoftTifa(PartedEvaluator):
    """Base class of Soft-TIFA evaluators; a subclass reads the questions and implements `load`.

    `geneval2[<judge>]` is 100 x the mean over images of the geometric mean of the probabilities of right answers,
    `geneval2_am[<judge>]` the same with the arithmetic mean. The parts `atoms-<n>` are the former over prompts of n
    atoms; those of a skill are 100 x the mean probability over all questions of that skill.
    """

    name: ClassVar[str] = "geneval2"
    spec: ClassVar[MetricSpec] = MetricSpec("higher", "points", digits=2)

    @property
    def metric(self) -> str:
        """Name of the mean of geometric means."""
        return f"geneval2[{self.protocol}]"

    @property
    def arithmetic(self) -> str:
        """Name of the mean of arithmetic means."""
        return f"geneval2_am[{self.protocol}]"

    @property
    def metrics(self) -> Mapping[str, MetricSpec]:
        """Both means, and the parts of the geometric one."""
        return {**super().metrics, self.arithmetic: self.spec}

    @abstractmethod
    def read_questions(self, images: ImageSet) -> list[Questions]:
        """Return the questions about each image.

        Raises:
            SkipEvaluation: the prompts have none.
        """

    @abstractmethod
    def load(self, device: str) -> tuple[Grade, Mapping[str, str]]:
        """Read the judge; return its function, and the hashes of the files used."""

    def run(self, samples: ImageSet, reference: ImageSet | None, device: str) -> Result:
        """Grade every image; the reference is not used."""
        asked = self.read_questions(samples)
        grade, hashes = self.load(device)
        by_index = dict(zip(samples.indices, asked, strict=True))
        soft = [
            list(grade(samples.image(index), by_index[index].atoms))
            for [index] in samples.batches(1, self.name)
        ]
        columns: dict[str, Sequence[object]] = {
            "index": samples.indices,
            self.metric: [100 * geometric_mean(found) for found in soft],
            self.arithmetic: [100 * float(np.mean(found)) for found in soft],
            "questions": [[atom.question for atom in one.atoms] for one in asked],
            "probabilities": soft,
        }
        scores = self.summarise(asked, soft, samples.clusters)
        return make_result(self, scores, columns, hashes)

    def summarise(
        self, asked: Sequence[Questions], soft: Sequence[Sequence[float]], clusters: Sequence[str]
    ) -> dict[str, Score]:
        """Return the scores of graded images, in the order of `metrics`; parts without questions are left out.

        Args:
            asked: questions of each image.
            soft: probabilities of their right answers.
            clusters: prompt of each image; prompts are resampled whole.
        """
        whole = [100 * geometric_mean(found) for found in soft]
        means = [100 * float(np.mean(found)) for found in soft]
        parts: dict[str, tuple[list[float], list[str]]] = {}
        for one, found, value, cluster in zip(asked, soft, whole, clusters, strict=True):
            graded = [(f"atoms-{one.atomicity}", value)]
            graded += [(atom.skill, 100 * p) for atom, p in zip(one.atoms, found, strict=True)]
            for part, points in graded:
                values, prompts = parts.setdefault(part, ([], []))
                values.append(points)
                prompts.append(cluster)
        scores = {self.metric: _score(whole, clusters)}
        scores |= {f"{self.metric}/{part}": _score(*parts[part]) for part in self.part_names if part in parts}
        return {**scores, self.arithmetic: _score(means, clusters)}


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean of one or more values, 0 if one of them is 0."""
    if min(values) <= 0:
        return 0.0
    return float(np.exp(np.log(np.array(values, np.float64)).mean()))


def _score(points: Sequence[float], clusters: Sequence[str]) -> Score:
    """Return the mean of points from 0 to 100, with an interval that ends where they do."""

    def find_interval(values: Sequence[float], prompts: Sequence[str]) -> Interval | None:
        found = bootstrap(values, prompts)
        return None if found is None else found.clip(0, 100)

    return mean_score(points, clusters, find_interval)
