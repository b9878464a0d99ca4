"""GenEval (Ghosh et al., arXiv:2310.11513) with a configurable detector.

A detector reads instances from pixels; its name is part of the metric's name, because scores of different
detectors do not compare.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kvbench.eval.files.images import ImageSet
from kvbench.eval.geneval.rules import OFFICIAL, TASKS, ColorOf, Detector, Line, Rules, geneval_image
from kvbench.eval.protocol.base import PartedEvaluator, Result, SkipEvaluation, make_result, read_meta
from kvbench.eval.protocol.component import Component
from kvbench.eval.protocol.intervals import combine_strata
from kvbench.eval.protocol.scores import MetricSpec, Score, share_score, with_interval
from kvbench.eval.protocol.shares import share_interval

TAG = "tag"
"""Key of the task in a prompt's line, and its column of the samples."""
REWRITTEN = "-rewritten"
"""Suffix of a detector's name for rewritten prompts, whose scores have columns of their own."""


@dataclass(frozen=True)
class LoadedDetector:
    """A detector with its weights read.

    Attributes:
        detect: instances of an image.
        colors: the classifier of an image's instances; None where the detector names colours itself.
        weights: hashes of the files used.
    """

    detect: Detector
    colors: Callable[[NDArray[np.uint8]], ColorOf] | None = None
    weights: Mapping[str, str] = field(default_factory=dict)


class DetectorModel(Component, ABC):
    """Base class of detectors with weights.

    Attributes:
        classes: names of the classes that it can find.
    """

    classes: ClassVar[tuple[str, ...]]

    @abstractmethod
    def load(self, device: str) -> LoadedDetector:
        """Read the weights."""


def geneval_summary(
    name: str, tags: Sequence[str], correct: Sequence[bool], prompts: Sequence[str]
) -> dict[str, Score]:
    """Scores of judged images: overall (mean of the tasks' means), each task, prompts with a correct image.

    Images of one prompt are one cluster, tasks are strata: the interval of the overall score comes from the tasks'.
    """
    tasks = [task for task in TASKS if task in tags]
    strata = {
        task: (
            [float(c) for c, tag in zip(correct, tags, strict=True) if tag == task],
            [p for p, tag in zip(prompts, tags, strict=True) if tag == task],
        )
        for task in tasks
    }
    scores = {f"{name}/{task}": share_score(values, group) for task, (values, group) in strata.items()}
    means = [float(np.mean(values)) for values, _ in strata.values()]
    interval = combine_strata(means, [share_interval(*stratum) for stratum in strata.values()])
    solved: dict[str, float] = {}
    for prompt, right in zip(prompts, correct, strict=True):
        solved[prompt] = max(solved.get(prompt, 0.0), float(right))
    return {
        name: with_interval(Score(float(np.mean(means)), len(correct)), interval),
        **scores,
        f"{name}/correct_prompts": share_score(list(solved.values())),
    }


@dataclass(frozen=True)
class GenEvalMetrics(PartedEvaluator):
    """Base class of GenEval's evaluators, whose metrics are named after the protocol."""

    name: ClassVar[str] = "geneval"
    spec: ClassVar[MetricSpec] = MetricSpec("higher", digits=3, strata=TAG)
    part_names: ClassVar[tuple[str, ...]] = (*TASKS, "correct_prompts")
    asks: ClassVar[str] = TAG

    @property
    def metric(self) -> str:
        """Name of the overall score."""
        return f"geneval[{self.protocol}]"

    def check_meta(self, meta: Mapping[str, object]) -> None:
        """Check that a prompt's metadata is a GenEval line."""
        super().check_meta(meta)
        Line.parse(meta)


@dataclass(frozen=True)
class GenEval(GenEvalMetrics):
    """`geneval[<detector>]`: share of correct images, averaged over the six tasks.

    Of rewritten prompts (`prompts.rewritten`) it is `geneval[<detector>-rewritten]`.

    Attributes:
        detector: a function from an image, uint8 [H, W, 3], to its instances, or a model to load.
        detector_name: goes into the metric's name.
        rules: thresholds.
    """

    detector: Detector | DetectorModel
    detector_name: str = "scenes"
    rules: Rules = OFFICIAL

    @property
    def protocol(self) -> str:
        """The detector's name."""
        return self.detector_name

    def adapt(self, images: ImageSet) -> "GenEval":
        """Return the evaluator under its name for rewritten prompts, where they are."""
        return replace(self, detector_name=self.detector_name + REWRITTEN) if images.rewritten else self

    def run(self, images: ImageSet, reference: ImageSet | None, device: str) -> Result:
        """Judge every image; the reference is not used, and a detector function chooses its own device."""
        tags = geneval_tags(images)
        detector = self.detector
        if isinstance(detector, DetectorModel):
            check_classes(images, detector.classes)
            sight = detector.load(device)
        else:
            sight = LoadedDetector(detector)
        rows = []
        for [index] in images.batches(1, self.name):
            pixels = images.image(index)
            instances = sight.detect(pixels)
            color_of = None if sight.colors is None else sight.colors(pixels)
            correct, reasons = geneval_image(instances, images.meta(index), color_of, self.rules)
            found = [
                {"label": i.label, "score": float(i.score), "box": list(map(float, i.box)), "color": i.color}
                for i in instances
            ]
            rows.append((index, images.meta(index)[TAG], correct, "; ".join(reasons), found))
        names = ("index", TAG, self.metric, "reason", "found")
        columns = dict(zip(names, zip(*rows, strict=True), strict=True))
        scores = geneval_summary(self.metric, tags, [row[2] for row in rows], images.clusters)
        return make_result(self, scores, columns, sight.weights, absent_tasks(tags))


def geneval_tags(images: ImageSet) -> list[str]:
    """Return the task of every image."""
    return [str(tag) for tag in read_meta(images, TAG, "GenEval line", "(tag, include, exclude)")]


def check_classes(images: ImageSet, classes: Sequence[str]) -> None:
    """Check that a detector knows every class that the prompts name.

    Raises:
        SkipEvaluation: it does not.
    """
    lines = [Line.parse(images.meta(index)) for index in images.indices]
    wanted = {clause.label for line in lines for clause in (*line.include, *line.exclude)}
    if unknown := sorted(wanted - set(classes)):
        raise SkipEvaluation(
            f"the detector has no class {', '.join(unknown[:5])}: these prompts are not for it"
        )


def absent_tasks(tags: Sequence[str]) -> str | None:
    """Return a caveat that names the tasks without prompts."""
    absent = [task for task in TASKS if task not in tags]
    if not absent:
        return None
    return f"no prompts of {', '.join(absent)}: the overall score averages the other tasks"
