"""UniGenBench++ (arXiv:2510.18701) judged by its authors' own program: images out in its layout, its answers in."""

import ast
import csv
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kvbench.eval.files.images import ImageSet
from kvbench.eval.files.weights import file_sha256
from kvbench.eval.protocol.base import PartedEvaluator, Result, make_result, read_meta
from kvbench.eval.protocol.official import require_results
from kvbench.eval.protocol.scores import MetricSpec, Score, jackknife_score, share_score

FOLDER = "unigenbench"
PER_PROMPT = 4
DIMENSIONS = (
    *("Style", "World Knowledge", "Attribute", "Action", "Relationship", "Compound", "Grammar"),
    *("Entity Layout", "Text Generation", "Logical Reasoning"),
)
COLUMNS = ("img_path", "testpoint", "result_json")

Points = Sequence[tuple[str, bool]]
"""Dimension of each test point of an image, and whether the image passes it."""


@dataclass(frozen=True)
class UniGenBench(PartedEvaluator):
    """`unigenbench[<judge>]`: 100 x mean over dimensions of the share of test points that images pass.

    First the images are laid out in the run's folder as the authors' program wants them, and the result says which
    command to run; then, with `scores`, the table that it wrote is read. A run and its reference each have their own.

    Attributes:
        judge: the program's model; names the metric.
        scores: read the table.
    """

    judge: str = "qwen2.5-vl-72b"
    scores: bool = False
    name: ClassVar[str] = "unigenbench"
    asks: ClassVar[str] = "unigenbench_index"
    spec: ClassVar[MetricSpec] = MetricSpec("higher", "points", digits=2)
    part_names: ClassVar[tuple[str, ...]] = DIMENSIONS

    @property
    def protocol(self) -> str:
        """The judge's name."""
        return self.judge

    @property
    def metric(self) -> str:
        """The overall score's name."""
        return f"unigenbench[{self.judge}]"

    def run(self, samples: ImageSet, reference: ImageSet | None, device: str) -> Result:
        """Export the images, or import the answers; reference and device are not used."""
        names = layout(samples)
        folder = samples.folder.resolve() / FOLDER
        path = folder / "results.csv"
        command = (
            f"in UniGenBench's environment run one of its eval/*_en_eval.py with --data_path {folder / 'images'}, and "
            f"copy the table that it writes (results/images_en.csv) to {path}"
        )
        require_results(
            path,
            command,
            "eval.unigenbench.scores",
            wanted=self.scores,
            export=lambda: export(samples, names, folder / "images"),
        )
        found, dropped = read_answers(path)
        if absent := [name for name in names.values() if name not in found and name not in dropped]:
            raise ValueError(f"{path}: no answer on {absent[0]}.png ({len(absent)} are missing)")
        indices = [index for index, name in names.items() if name in found]
        if not indices:
            raise ValueError(f"{path}: no answer on any image can be read")
        judged = [found[names[index]] for index in indices]
        clusters = [samples.samples[index].cluster for index in indices]
        columns: dict[str, Sequence[object]] = {
            "index": indices,
            "passed": [[passed for _, passed in points] for points in judged],
        }
        caveat = f"answers on {len(dropped)} images could not be read" if dropped else None
        return make_result(
            self, self.summarise(judged, clusters), columns, {path.name: file_sha256(path)}, caveat
        )

    def summarise(self, judged: Sequence[Points], clusters: Sequence[str]) -> dict[str, Score]:
        """Return the overall score and those of the dimensions.

        Args:
            judged: test points of each image.
            clusters: prompt of each image.
        """
        right, asked = (np.zeros((len(judged), len(DIMENSIONS))) for _ in range(2))
        parts: dict[str, tuple[list[float], list[str]]] = {}
        for row, (points, cluster) in enumerate(zip(judged, clusters, strict=True)):
            for dimension, passed in points:
                column = DIMENSIONS.index(dimension)
                right[row, column] += passed
                asked[row, column] += 1
                values, prompts = parts.setdefault(dimension, ([], []))
                values.append(100.0 * passed)
                prompts.append(cluster)

        def mean_share(kept: NDArray[np.int64]) -> float:
            passed, total = right[kept].sum(0), asked[kept].sum(0)
            return float(100 * (passed[total > 0] / total[total > 0]).mean())

        scores = {self.metric: jackknife_score(mean_share, clusters)}
        for dimension in DIMENSIONS:
            if dimension in parts:
                scores[f"{self.metric}/{dimension}"] = share_score(*parts[dimension], whole=100)
        return scores


def layout(images: ImageSet) -> dict[int, str]:
    """Return the name, `<prompt>_<copy>`, of every image's file without its ending.

    Raises:
        SkipEvaluation: the prompts are not the benchmark's.
        ValueError: there are not four images of every prompt.
    """
    what, where = "UniGenBench number", "(unigenbench_index): use prompts=unigenbench"
    prompts: dict[str, list[int]] = {}
    for index, prompt in zip(
        images.indices, read_meta(images, "unigenbench_index", what, where), strict=True
    ):
        prompts.setdefault(str(prompt), []).append(index)
    if wrong := [prompt for prompt, indices in prompts.items() if len(indices) != PER_PROMPT]:
        raise ValueError(
            f"the official program wants {PER_PROMPT} images of every prompt, there are {len(prompts[wrong[0]])} of "
            f"prompt {wrong[0]} (prompts.per_prompt)"
        )
    return {
        index: f"{prompt}_{copy}" for prompt, indices in prompts.items() for copy, index in enumerate(indices)
    }


def export(images: ImageSet, names: Mapping[int, str], folder: Path) -> None:
    """Put the images into one folder under their names."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for index, name in names.items():
        images.export(index, folder / f"{name}.png")


def read_answers(path: Path) -> tuple[dict[str, Points], list[str]]:
    """Return the test points of each image by its file's name, and the images whose answer cannot be read.

    Raises:
        ValueError: a column is missing, an image comes twice, or a test point has an unknown dimension.
    """
    found: dict[str, Points] = {}
    dropped: list[str] = []
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if absent := [name for name in COLUMNS if name not in (reader.fieldnames or ())]:
            raise ValueError(f"{path}: no column {absent[0]}; needed: {', '.join(COLUMNS)}")
        for line in reader:
            name = Path(line["img_path"]).stem
            if name in found or name in dropped:
                raise ValueError(f"{path}: {name}.png appears twice")
            try:
                found[name] = parse_points(line["testpoint"], line["result_json"])
            except (SyntaxError, KeyError, TypeError, json.JSONDecodeError):
                dropped.append(name)
    return found, dropped


def parse_points(testpoints: str, answer: str) -> Points:
    """Return dimension and outcome of each test point of a row.

    Args:
        testpoints: a list of names, `<dimension> - <subdimension>` or `<dimension>`, as Python writes it.
        answer: JSON object with `score`, a list of 0 and 1.

    Raises:
        ValueError: a dimension is unknown, or there are not as many scores as test points.
        SyntaxError, KeyError, TypeError: the row cannot be read.
    """
    points, scores = ast.literal_eval(testpoints), json.loads(answer)["score"]
    dimensions = [str(point).partition("-")[0].strip() for point in points]
    if unknown := [dimension for dimension in dimensions if dimension not in DIMENSIONS]:
        raise ValueError(f"{unknown[0]} is no dimension of UniGenBench: {', '.join(DIMENSIONS)}")
    if len(scores) != len(dimensions):
        raise ValueError(f"{len(scores)} scores for {len(dimensions)} test points: {testpoints}")
    return [(dimension, score == 1) for dimension, score in zip(dimensions, scores, strict=True)]
