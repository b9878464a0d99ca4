"""DPG-Bench by its authors' program (mPLUG): export of images, import of its scores."""

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np

from kvbench.core.files import read_text
from kvbench.eval.alignment.dpg import CATEGORIES, read_items
from kvbench.eval.files.images import ImageSet
from kvbench.eval.files.weights import file_sha256
from kvbench.eval.protocol.base import Evaluator, Result, make_result
from kvbench.eval.protocol.official import group_images, require_results
from kvbench.eval.protocol.scores import MetricSpec, Score, share_score, with_parts

METRIC = "dpg[official]"
FOLDER, RESULTS = "dpg_official", "results.txt"
MAX_IMAGES = 4
"""Number of images of an item that the program reads: it cuts one picture into quarters."""
LINE = re.compile(r"(?P<path>.+\.png), (?P<scores>[0-9.e+-]+(?:, [0-9.e+-]+)+)")
"""Line of the program's output: path of the item's picture, score of each image, mean of the scores."""
TOTAL = re.compile(r"DPG-Bench score: (?P<value>[0-9.e+-]+)")
CATEGORY = re.compile(r"\t(?P<name>[^\t:]+): (?P<value>[0-9.e+-]+)")


@dataclass(frozen=True)
class DpgOfficial(Evaluator):
    """`dpg[official]`: scores of compute_dpg_bench.py (modelscope's mPLUG, a GPU, an environment of its own).

    The first call exports the images to the run's folder, one picture for each item, and the result says which command
    to run. With `scores` the output of the program is read: the score of each image, and the scores of the categories,
    which it computes from each item's last image. A run and its reference have separate outputs.

    The program skips the first question of its table and drops the item with questions that depend on it. One item may
    therefore be missing; a caveat names it.

    Attributes:
        scores: read the scores.
    """

    scores: bool = False
    name: ClassVar[str] = "dpg"
    protocol: ClassVar[str] = "official"
    meta_keys: ClassVar[tuple[str, ...]] = ("item_id",)
    metrics: ClassVar[Mapping[str, MetricSpec]] = with_parts(
        METRIC, MetricSpec("higher", digits=2), CATEGORIES
    )

    def list_references(self, run: Path) -> Mapping[str, Path | None]:
        """Return the output of the program, if it is read."""
        return {"scores": run / FOLDER / RESULTS} if self.scores else {}

    def run(self, images: ImageSet, reference: ImageSet | None, device: str) -> Result:
        """Export the images or import their scores; reference and device are not used."""
        items = group_images(images, read_items(images))
        folder = images.folder.resolve() / FOLDER
        path = folder / RESULTS
        side, count = check_layout(images, items)
        command = (
            f"in ELLA's environment run: python dpg_bench/compute_dpg_bench.py --image-root-path {folder / 'images'} "
            f"--resolution {side} --pic-num {count} --res-path {path}"
        )
        write = partial(export, images, items, folder / "images")
        require_results(path, command, "eval.dpg_official.scores", self.scores, write)
        results, categories = read_results(path)
        missing = check_results(path, results, items, count)
        judged = {item: results[item] for item in items if item in results}
        columns: dict[str, list[object]] = {
            "index": [index for item in judged for index in items[item]],
            "item_id": [item for item in judged for _ in items[item]],
            METRIC: [100 * score for scores in judged.values() for score in scores],
        }
        means = [100 * float(np.mean(scores)) for scores in judged.values()]
        scores = {METRIC: share_score(means, whole=100)}
        for category in CATEGORIES:
            if category in categories:
                scores[f"{METRIC}/{category}"] = Score(categories[category], len(judged))
        caveat = f"left out by the official program: {missing}" if missing else None
        return make_result(self, scores, columns, {path.name: file_sha256(path)}, caveat)


def check_layout(images: ImageSet, items: Mapping[str, list[int]]) -> tuple[int, int]:
    """Return the side of the images and the number of images per item.

    Raises:
        ValueError: images are not squares of one size, or items have different numbers of them, or more than four.
    """
    sizes = {images.samples[index].size for index in images.indices}
    if len(sizes) > 1 or min(sizes)[0] != min(sizes)[1]:
        raise ValueError(f"the official program wants square images of one size, not {sorted(sizes)}")
    counts = {len(indices) for indices in items.values()}
    if len(counts) > 1 or max(counts) > MAX_IMAGES:
        raise ValueError(
            f"the official program wants equally many images of every item, at most {MAX_IMAGES}, not "
            f"{', '.join(map(str, sorted(counts)))} (prompts.per_prompt)"
        )
    return min(sizes)[0], max(counts)


def export(images: ImageSet, items: Mapping[str, list[int]], folder: Path) -> None:
    """Write one picture for each item, named after it, with its images in rows of two."""
    shutil.rmtree(folder, ignore_errors=True)  # the program reads every file in it
    folder.mkdir(parents=True)
    for item, indices in items.items():
        target = folder / f"{item}.png"
        if len(indices) == 1:
            images.export(indices[0], target)
        else:
            images.grid(indices).save(target, compress_level=1)


def read_results(path: Path) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return the scores of images (0 to 1) by item, and of categories (0 to 100) by name.

    Raises:
        ValueError: the file is malformed or unfinished, or its total is not the mean of its lines.
    """
    text = read_text(path)
    scores: dict[str, list[float]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if match := LINE.fullmatch(line):
            *each, mean = map(float, match["scores"].split(", "))
            item = Path(match["path"]).stem
            if item in scores:
                raise ValueError(f"{path}, line {number}: {item} appears twice")
            if abs(mean - float(np.mean(each))) > 1e-6 or not 0 <= min(each) <= max(each) <= 1:
                raise ValueError(f"{path}, line {number}: {mean} is not the mean of scores from 0 to 1")
            scores[item] = each
    total = TOTAL.search(text)
    if not scores or total is None:
        raise ValueError(
            f"{path}: not the output of a finished compute_dpg_bench.py: lines of pictures, then `DPG-Bench score: ...`"
        )
    if abs(float(total["value"]) - 100 * np.mean([np.mean(each) for each in scores.values()])) > 1e-4:
        raise ValueError(f"{path}: its DPG-Bench score {total['value']} is not the mean of its lines")
    summary = text.partition("L1 category scores:\n")[2].partition("L2 category scores:")[0]
    return scores, {match["name"]: float(match["value"]) for match in CATEGORY.finditer(summary)}


def check_results(
    path: Path, results: Mapping[str, list[float]], items: Mapping[str, list[int]], count: int
) -> str | None:
    """Return the missing item, or None.

    Raises:
        ValueError: an item is not from this run, has another number of images, or several items are missing.
    """
    if unknown := [item for item in results if item not in items]:
        raise ValueError(f"{path}: {unknown[0]} is not an item of this run ({len(unknown)} are not)")
    if wrong := [item for item, scores in results.items() if len(scores) != count]:
        raise ValueError(
            f"{path}: {len(results[wrong[0]])} scores of {wrong[0]}, which has {count} images (--pic-num {count})"
        )
    missing = [item for item in items if item not in results]
    if len(missing) > 1:
        raise ValueError(
            f"{path}: no scores of {', '.join(missing[:5])} ({len(missing)} of {len(items)} items are missing)"
        )
    return missing[0] if missing else None
