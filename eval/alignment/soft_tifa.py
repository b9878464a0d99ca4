"""Soft-TIFA of GenEval2 (Kamath et al., arXiv:2512.16853): probabilities of correct answers about an image."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvbench.eval.files.images import ImageSet
from kvbench.eval.files.weights import loading
from kvbench.eval.networks import Pixels
from kvbench.eval.protocol.base import Evaluator, Result, make_result
from kvbench.eval.protocol.intervals import Interval, bootstrap
from kvbench.eval.protocol.scores import MetricSpec, Score, mean_score, score_parts


@dataclass(frozen=True)
class Atom:
    """One question about an image.

    Attributes:
        question: the question.
        answer: correct answer, `Yes` or a number as a word.
        skill: tested skill, such as `count`.
    """

    question: str
    answer: str
    skill: str


@dataclass(frozen=True)
class Questions:
    """Questions about the images of one prompt.

    Attributes:
        atoms: one or more questions.
        atomicity: number of atoms as counted by the benchmark, which may exclude some questions.
    """

    atoms: tuple[Atom, ...]
    atomicity: int


Grade = Callable[[Pixels, Sequence[Atom]], Sequence[float]]
"""Function from an image uint8 [H, W, 3] and questions to the probabilities (0 to 1) of correct answers."""


class SoftTifa(Evaluator):
    """Base class of Soft-TIFA evaluators; a subclass reads the questions and implements `load`.

    `<name>[<judge>]` is 100 x the mean over images of the geometric mean of the probabilities of correct answers,
    `<name>_am[<judge>]` has the arithmetic mean instead; the name is `geneval2`, or `geneval2_hard` for Hard TIFA. The
    part `atoms-<n>` is the metric over prompts of n atoms; the part of a skill is 100 x the mean probability over all
    questions of that skill.
    """

    name: ClassVar[str] = "geneval2"
    spec: ClassVar[MetricSpec] = MetricSpec("higher", "points", digits=2)

    @property
    def arithmetic(self) -> str:
        """Name of the metric with arithmetic means."""
        return f"{self.name}_am[{self.protocol}]"

    @property
    def metrics(self) -> Mapping[str, MetricSpec]:
        """Specifications of both means and of the parts."""
        return {**super().metrics, self.arithmetic: self.spec}

    @abstractmethod
    def read_questions(self, images: ImageSet) -> list[Questions]:
        """Return the questions about each image; raise SkipEvaluation if the prompts have none."""

    @abstractmethod
    def load(self, device: str) -> tuple[Grade, Mapping[str, str]]:
        """Load the judge; return its grading function, and the hashes of the files used."""

    def run(self, samples: ImageSet, reference: ImageSet | None, device: str) -> Result:
        """Return the grades of every image and their means; the reference is not used."""
        questions = self.read_questions(samples)
        with loading(self.weights):
            grade, hashes = self.load(device)
        by_index = dict(zip(samples.indices, questions, strict=True))
        soft = [
            list(grade(samples.image(index), by_index[index].atoms))
            for [index] in samples.batches(1, self.name)
        ]
        columns: dict[str, Sequence[object]] = {
            "index": samples.indices,
            self.metric: [100 * geometric_mean(row) for row in soft],
            self.arithmetic: [100 * float(np.mean(row)) for row in soft],
            "questions": [[atom.question for atom in asked.atoms] for asked in questions],
            "probabilities": soft,
        }
        scores = self.summarise(questions, soft, samples.clusters)
        return make_result(self, scores, columns, hashes)

    def summarise(
        self, questions: Sequence[Questions], soft: Sequence[Sequence[float]], clusters: Sequence[str]
    ) -> dict[str, Score]:
        """Return the scores of graded images, in the order of `metrics`; parts without questions are left out.

        Args:
            questions: questions about each image.
            soft: probabilities of the correct answers, by image and question.
            clusters: prompt of each image; prompts are resampled whole.
        """
        whole = [100 * geometric_mean(row) for row in soft]
        means = [100 * float(np.mean(row)) for row in soft]
        graded: list[tuple[str, float, str]] = []
        for asked, row, value, cluster in zip(questions, soft, whole, clusters, strict=True):
            graded.append((f"atoms-{asked.atomicity}", value, cluster))
            graded += [(atom.skill, 100 * p, cluster) for atom, p in zip(asked.atoms, row, strict=True)]
        parts = score_parts(self.metric, self.part_names, graded, _score)
        return {self.metric: _score(whole, clusters), **parts, self.arithmetic: _score(means, clusters)}


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean of one or more values, 0 if one of them is 0."""
    if min(values) <= 0:
        return 0.0
    return float(np.exp(np.log(np.array(values, np.float64)).mean()))


def _score(points: Sequence[float], clusters: Sequence[str]) -> Score:
    """Return the mean of points from 0 to 100, with an interval clipped to this range."""

    def find_interval(values: Sequence[float], prompts: Sequence[str]) -> Interval | None:
        interval = bootstrap(values, prompts)
        return None if interval is None else interval.clip(0, 100)

    return mean_score(points, clusters, find_interval)
