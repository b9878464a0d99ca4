"""UniGenBench++ (arXiv:2510.18701) by its official code: export of images, import of its answers."""

import ast
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kvbench.eval.files.images import ImageSet
from kvbench.eval.files.samples import group_indices
from kvbench.eval.protocol.base import read_meta
from kvbench.eval.protocol.official import (
    Groups,
    Imported,
    OfficialProgram,
    check_names,
    read_table,
)
from kvbench.eval.protocol.scores import MetricSpec, Score, jackknife_score, score_parts, share_score

PER_PROMPT = 4  # images of a prompt that the official code reads
DIMENSIONS = (
    *("Style", "World Knowledge", "Attribute", "Action", "Relationship", "Compound", "Grammar"),
    *("Entity Layout", "Text Generation", "Logical Reasoning"),
)
COLUMNS = ("img_path", "testpoint", "result_json")

Points = Sequence[tuple[str, bool]]
"""Dimension and outcome of each test point of an image."""


@dataclass(frozen=True)
class UniGenBench(OfficialProgram):
    """`unigenbench[<judge>]`: 100 x mean over dimensions of the share of test points that images pass.

    Attributes:
        judge: name of the official code's model, part of the metric's name.
        scores: read the official code's table, instead of exporting images for it.
    """

    judge: str = "qwen2.5-vl-72b"
    scores: bool = False
    folder: ClassVar[str] = "unigenbench"
    results: ClassVar[str] = "results.csv"
    steps: ClassVar[str] = (
        "in UniGenBench's environment run one of its eval/*_en_eval.py with --data_path {folder}/images, and copy the "
        "table that it writes (results/images_en.csv) to {path}"
    )
    name: ClassVar[str] = "unigenbench"
    required_meta: ClassVar[str] = "unigenbench_index"
    meta_keys: ClassVar[tuple[str, ...]] = ("unigenbench_index",)
    spec: ClassVar[MetricSpec] = MetricSpec("higher", "points", digits=2)
    part_names: ClassVar[tuple[str, ...]] = DIMENSIONS

    @property
    def protocol(self) -> str:
        """Name of the judge that the official code ran."""
        return self.judge

    def group(self, images: ImageSet) -> Groups:
        """Return each image by its name `<prompt>_<copy>`.

        Raises:
            SkipEvaluation: the prompts are not from the benchmark.
            ValueError: a prompt does not have four images.
        """
        what, where = "UniGenBench number", "(unigenbench_index): use prompts=unigenbench"
        prompts = group_indices(images.indices, map(str, read_meta(images, "unigenbench_index", what, where)))
        for prompt, indices in prompts.items():
            if len(indices) != PER_PROMPT:
                raise ValueError(
                    f"the official code needs {PER_PROMPT} images of every prompt, there are {len(indices)} of "
                    f"prompt {prompt} (prompts.per_prompt)"
                )
        return {
            f"{name}_{copy}": [index] for name, copies in prompts.items() for copy, index in enumerate(copies)
        }

    def read(self, images: ImageSet, groups: Groups, path: Path) -> Imported:
        """Return the shares of passed test points from the official code's answers."""
        answers, dropped = read_answers(path)
        check_names(path, [name for name in (*answers, *dropped) if name in groups], groups)
        indices = [index for name, [index] in groups.items() if name in answers]
        if not indices:
            raise ValueError(f"{path}: no answer on any image can be read; make it again")
        judged = [answers[name] for name in groups if name in answers]
        clusters = [images.samples[index].cluster for index in indices]
        columns: dict[str, Sequence[object]] = {
            "index": indices,
            "passed": [[passed for _, passed in points] for points in judged],
        }
        caveat = f"answers on {len(dropped)} images could not be read" if dropped else None
        return self.summarise(judged, clusters), columns, caveat

    def summarise(self, judged: Sequence[Points], clusters: Sequence[str]) -> dict[str, Score]:
        """Return the overall score and the score of each dimension, from the test points and prompt of each image."""
        right, total = (np.zeros((len(judged), len(DIMENSIONS))) for _ in range(2))
        for row, points in enumerate(judged):
            for dimension, passed in points:
                column = DIMENSIONS.index(dimension)
                right[row, column] += passed
                total[row, column] += 1

        def mean_share(positions: NDArray[np.int64]) -> float:
            passed, count = right[positions].sum(0), total[positions].sum(0)
            return float(100 * (passed[count > 0] / count[count > 0]).mean())

        pairs = zip(judged, clusters, strict=True)
        graded = ((name, 100.0 * passed, cluster) for points, cluster in pairs for name, passed in points)
        parts = score_parts(self.metric, DIMENSIONS, graded, partial(share_score, whole=100))
        return {self.metric: jackknife_score(mean_share, clusters), **parts}


def read_answers(path: Path) -> tuple[dict[str, Points], list[str]]:
    """Return the test points of each image by file stem, and the images whose answer cannot be read.

    Raises:
        ValueError: a column is missing, an image appears twice, or a test point has an unknown dimension.
    """
    points: dict[str, Points] = {}
    dropped: list[str] = []
    for row in read_table(path, COLUMNS):
        name = Path(row["img_path"]).stem
        if name in points or name in dropped:
            raise ValueError(f"{path}: {name}.png appears twice; remove one")
        try:
            points[name] = parse_points(row["testpoint"], row["result_json"])
        except (SyntaxError, KeyError, TypeError, json.JSONDecodeError):
            dropped.append(name)
    return points, dropped


def parse_points(testpoints: str, answer: str) -> Points:
    """Return dimension and outcome of each test point of a row.

    Args:
        testpoints: Python list of names, `<dimension> - <subdimension>` or `<dimension>`.
        answer: JSON object with `score`, a list of 0 and 1.

    Raises:
        ValueError: a dimension is unknown, or the numbers of scores and test points differ.
        SyntaxError, KeyError, TypeError: the row is malformed.
    """
    points, scores = ast.literal_eval(testpoints), json.loads(answer)["score"]
    dimensions = [str(point).partition("-")[0].strip() for point in points]
    if unknown := [dimension for dimension in dimensions if dimension not in DIMENSIONS]:
        raise ValueError(f"{unknown[0]} is not a dimension of UniGenBench: {', '.join(DIMENSIONS)}")
    if len(scores) != len(dimensions):
        raise ValueError(f"{len(scores)} scores for {len(dimensions)} test points: {testpoints}")
    return [(dimension, score == 1) for dimension, score in zip(dimensions, scores, strict=True)]
