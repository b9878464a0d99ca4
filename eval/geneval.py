"""GenEval (Ghosh et al., arXiv:2310.11513) on whatever detector is given.

A detector reads instances from pixels; its name is part of the metric's name, because scores of different
detectors do not compare.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvbench.eval.base import Better, Result, Score, SkipEvaluation, mean_score, ok, with_interval
from kvbench.eval.images import ImageSet
from kvbench.eval.intervals import stratified
from kvbench.eval.verdict import OFFICIAL, TASKS, Detector, Rules, geneval_image
from kvbench.eval.weights import Weight


def geneval_summary(
    name: str, tags: Sequence[str], correct: Sequence[bool], prompts: Sequence[str]
) -> dict[str, Score]:
    """Scores of judged images: overall (mean of the tasks' means), each task, prompts with a correct image.

    Intervals resample prompts: images of one prompt are one cluster, tasks are strata.
    """
    tasks = [task for task in TASKS if task in tags]
    strata = {
        task: (
            [float(c) for c, tag in zip(correct, tags, strict=True) if tag == task],
            [p for p, tag in zip(prompts, tags, strict=True) if tag == task],
        )
        for task in tasks
    }
    scores = {
        f"{name}/{task}": mean_score(values, "higher", clusters=group)
        for task, (values, group) in strata.items()
    }
    overall = float(np.mean([np.mean(values) for values, _ in strata.values()]))
    solved: dict[str, float] = {}
    for prompt, right in zip(prompts, correct, strict=True):
        solved[prompt] = max(solved.get(prompt, 0.0), float(right))
    return {
        name: with_interval(Score(overall, "higher", "", len(correct)), stratified(strata)),
        **scores,
        f"{name}/correct_prompts": mean_score(list(solved.values()), "higher"),
    }


@dataclass(frozen=True)
class GenEval:
    """`geneval[<detector>]`: share of correct images, averaged over the six tasks.

    Attributes:
        detector: reads the instances of an image, uint8 [H, W, 3].
        detector_name: goes into the metric's name.
        rules: thresholds.
    """

    detector: Detector
    detector_name: str = "scenes"
    rules: Rules = OFFICIAL
    name: ClassVar[str] = "geneval"
    needs_reference: ClassVar[bool] = False
    packages: ClassVar[tuple[str, ...]] = ()
    weights: ClassVar[tuple[Weight, ...]] = ()

    @property
    def protocol(self) -> str:
        """The detector's name."""
        return self.detector_name

    @property
    def metric(self) -> str:
        """The overall score's name."""
        return f"geneval[{self.detector_name}]"

    @property
    def gives(self) -> dict[str, Better]:
        """Overall, six tasks, correct prompts."""
        higher: Better = "higher"
        return {
            self.metric: higher,
            **{f"{self.metric}/{part}": higher for part in (*TASKS, "correct_prompts")},
        }

    def run(self, images: ImageSet, reference: ImageSet | None, device: str) -> Result:
        """Judges every image; the reference is not looked at, the detector chooses its own device."""
        untagged = [index for index in images.indices if "tag" not in images.meta(index)]
        if len(untagged) == len(images):
            raise SkipEvaluation("the prompts carry no GenEval lines (tag, include, exclude)")
        if untagged:
            raise ValueError(f"sample {untagged[0]} has no GenEval line, others have")
        columns: dict[str, list[object]] = {
            name: [] for name in ("index", "tag", "correct", "reason", "found")
        }
        tags, verdicts = [], []
        for [index] in images.batches(1, self.name):
            meta = images.meta(index)
            instances = self.detector(images.image(index))
            correct, reasons = geneval_image(instances, meta, rules=self.rules)
            tags.append(str(meta["tag"]))
            verdicts.append(correct)
            found = [
                {"label": i.label, "score": float(i.score), "box": list(map(float, i.box)), "color": i.color}
                for i in instances
            ]
            for column, value in zip(
                columns.values(), (index, tags[-1], correct, "; ".join(reasons), found), strict=True
            ):
                column.append(value)
        absent = [task for task in TASKS if task not in tags]
        caveat = (
            f"no prompts of {', '.join(absent)}: the overall score averages the other tasks"
            if absent
            else None
        )
        return ok(self, geneval_summary(self.metric, tags, verdicts, images.clusters), columns, caveat=caveat)
