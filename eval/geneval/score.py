"""GenEval (Ghosh et al., arXiv:2310.11513) with a configurable detector.

The metric's name contains the detector's name, because scores of different detectors are not comparable.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from kvbench.eval.files.images import ImageSet
from kvbench.eval.files.weights import loading
from kvbench.eval.geneval.rules import OFFICIAL, TASKS, ColorOf, Detector, Line, Thresholds, judge_image
from kvbench.eval.networks import Pixels
from kvbench.eval.protocol.base import Evaluator, Result, SkipEvaluation, make_result, read_meta
from kvbench.eval.protocol.component import Component
from kvbench.eval.protocol.intervals import combine_strata, share_interval, split_groups
from kvbench.eval.protocol.scores import MetricSpec, Score, score_parts, share_score, with_interval

TAG = "tag"
"""Metadata key and column of the task of a prompt."""
REWRITTEN_SUFFIX = "-rewritten"
"""Suffix of the detector's name in the metric's name for rewritten prompts."""


@dataclass(frozen=True)
class LoadedDetector:
    """A detector with loaded weights.

    Attributes:
        detect: function from an image to its instances.
        colors: function from an image to its colour classifier; None if the detector names colours itself.
        weights: hashes of the files used.
    """

    detect: Detector
    colors: Callable[[Pixels], ColorOf] | None = None
    weights: Mapping[str, str] = field(default_factory=dict)


class DetectorModel(Component, ABC):
    """Base class of detectors with weights; `classes` has the names of the classes that it can find."""

    classes: ClassVar[tuple[str, ...]]

    @abstractmethod
    def load(self, device: str) -> LoadedDetector:
        """Load the weights and return the detector on `device`."""


def summarise_verdicts(
    name: str, tags: Sequence[str], correct: Sequence[bool], prompts: Sequence[str]
) -> dict[str, Score]:
    """Return the scores of judged images: mean over tasks, each task, and share of prompts with a correct image.

    Images of one prompt are a cluster. Tasks are strata: their intervals give the interval of the mean over tasks.
    """
    graded = list(zip(tags, map(float, correct), prompts, strict=True))
    groups = split_groups(graded)
    strata = [groups[task] for task in TASKS if task in groups]
    means = [float(np.mean(values)) for values, _ in strata]
    interval = combine_strata(means, [share_interval(*stratum) for stratum in strata])
    solved: dict[str, float] = {}
    for prompt, right in zip(prompts, correct, strict=True):
        solved[prompt] = max(solved.get(prompt, 0.0), float(right))
    return {
        name: with_interval(Score(float(np.mean(means)), len(correct)), interval),
        **score_parts(name, TASKS, graded, share_score),
        f"{name}/correct_prompts": share_score(list(solved.values())),
    }


@dataclass(frozen=True)
class GenEvalMetrics(Evaluator):
    """Base class of GenEval's evaluators."""

    name: ClassVar[str] = "geneval"
    spec: ClassVar[MetricSpec] = MetricSpec("higher", digits=3, strata=TAG)
    part_names: ClassVar[tuple[str, ...]] = (*TASKS, "correct_prompts")
    required_meta: ClassVar[str] = TAG
    meta_keys: ClassVar[tuple[str, ...]] = (TAG, "include", "exclude")

    def check_meta(self, meta: Mapping[str, object]) -> None:
        """Check that a prompt's metadata is a GenEval line."""
        super().check_meta(meta)
        Line.parse(meta)


@dataclass(frozen=True)
class GenEval(GenEvalMetrics):
    """`geneval[<detector>]`: share of correct images, averaged over the six tasks.

    With rewritten prompts (`prompts.rewritten`) the metric is `geneval[<detector>-rewritten]`.

    Attributes:
        detector: function that returns the instances of an image uint8 [H, W, 3], or a model to load.
        detector_name: part of the metric's name.
        rules: thresholds.
    """

    detector: Detector | DetectorModel
    detector_name: str = "scenes"
    rules: Thresholds = OFFICIAL

    @property
    def protocol(self) -> str:
        """Name of the detector's model."""
        return self.detector_name

    def adapt(self, images: ImageSet) -> "GenEval":
        """Return the evaluator, renamed if the prompts were rewritten."""
        return (
            replace(self, detector_name=self.detector_name + REWRITTEN_SUFFIX) if images.rewritten else self
        )

    def run(self, images: ImageSet, reference: ImageSet | None, device: str) -> Result:
        """Judge every image; the reference is not used, and a detector function chooses its own device."""
        tags = read_tags(images)
        detector = self.detector
        if isinstance(detector, DetectorModel):
            check_classes(images, detector.classes)
            with loading(detector.weights):
                loaded = detector.load(device)
        else:
            loaded = LoadedDetector(detector)
        rows = []
        for [index] in images.batches(1, self.name):
            pixels = images.image(index)
            instances = loaded.detect(pixels)
            color_of = None if loaded.colors is None else loaded.colors(pixels)
            correct, reasons = judge_image(instances, images.meta(index), color_of, self.rules)
            boxes = [
                {"label": i.label, "score": float(i.score), "box": list(map(float, i.box)), "color": i.color}
                for i in instances
            ]
            rows.append((index, images.meta(index)[TAG], correct, "; ".join(reasons), boxes))
        names = ("index", TAG, self.metric, "reason", "found")
        columns = dict(zip(names, zip(*rows, strict=True), strict=True))
        scores = summarise_verdicts(self.metric, tags, [row[2] for row in rows], images.clusters)
        return make_result(self, scores, columns, loaded.weights, describe_missing_tasks(tags))


def read_tags(images: ImageSet) -> list[str]:
    """Return the task of each image's prompt."""
    return [str(tag) for tag in read_meta(images, TAG, "GenEval line", "(tag, include, exclude)")]


def check_classes(images: ImageSet, classes: Sequence[str]) -> None:
    """Raise a SkipEvaluation if the prompts name a class that the detector does not know."""
    lines = [Line.parse(images.meta(index)) for index in images.indices]
    labels = {clause.label for line in lines for clause in (*line.include, *line.exclude)}
    if unknown := sorted(labels - set(classes)):
        raise SkipEvaluation(
            f"the detector lacks class {', '.join(unknown[:5])}; choose prompts with its classes"
        )


def describe_missing_tasks(tags: Sequence[str]) -> str | None:
    """Return a caveat that names the tasks without prompts, if any."""
    missing = ", ".join(task for task in TASKS if task not in tags)
    return f"no prompts of {missing}: the overall score averages the other tasks" if missing else None
