"""DPG-Bench judged by its authors' own program (mPLUG): images out in its layout, its scores in."""

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from kvbench.eval.alignment.dpg import CATEGORIES, dpg_items
from kvbench.eval.files.images import ImageSet
from kvbench.eval.files.weights import file_sha256
from kvbench.eval.protocol.base import Evaluator, Result, make_result
from kvbench.eval.protocol.official import require_results
from kvbench.eval.protocol.scores import MetricSpec, Score, share_score, with_parts

METRIC = "dpg[official]"
FOLDER = "dpg_official"
MAX_IMAGES = 4
"""Images of an item that the program looks at: it cuts one picture into quarters."""
LINE = re.compile(r"(?P<path>.+\.png), (?P<scores>[0-9.e+-]+(?:, [0-9.e+-]+)+)")
"""A line of the program's output: path of the item's picture, score of each image, their mean."""
TOTAL = re.compile(r"DPG-Bench score: (?P<value>[0-9.e+-]+)")
CATEGORY = re.compile(r"\t(?P<name>[^\t:]+): (?P<value>[0-9.e+-]+)")


@dataclass(frozen=True)
class DpgOfficial(Evaluator):
    """`dpg[official]`: scores of compute_dpg_bench.py (modelscope's mPLUG, a GPU, an environment of its own).

    First the images are laid out in the run's folder as that program wants them, one picture an item, and the result
    says which command to run; then, with `scores`, what it wrote there is read: the score of every image, and those
    of the categories, which it finds from each item's last image. A run and its reference each have their own.

    The program never asks the first question of its table and drops the item whose other questions rest on it; one
    item may be missing from what it wrote, therefore, and a caveat names it.

    Attributes:
        scores: read them.
    """

    scores: bool = False
    name: ClassVar[str] = "dpg"
    protocol: ClassVar[str] = "official"
    metrics: ClassVar[Mapping[str, MetricSpec]] = with_parts(
        METRIC, MetricSpec("higher", digits=2), CATEGORIES
    )

    def run(self, images: ImageSet, reference: ImageSet | None, device: str) -> Result:
        """Export the images, or import their scores; reference and device are not used."""
        items = group_items(images)
        folder = images.folder.resolve() / FOLDER
        path = folder / "results.txt"
        side, count = check_layout(images, items)
        command = (
            f"in ELLA's environment run: python dpg_bench/compute_dpg_bench.py --image-root-path {folder / 'images'} "
            f"--resolution {side} --pic-num {count} --res-path {path}"
        )
        require_results(
            path,
            command,
            "eval.dpg_official.scores",
            wanted=self.scores,
            export=lambda: export(images, items, folder / "images"),
        )
        found, categories = read_results(path)
        absent = check_results(path, found, items, count)
        judged = {item: found[item] for item in items if item in found}
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
        caveat = f"left out by the official program: {absent}" if absent else None
        return make_result(self, scores, columns, {path.name: file_sha256(path)}, caveat)


def group_items(images: ImageSet) -> dict[str, list[int]]:
    """Return the images of every item, by its name, in the order of their indices."""
    items: dict[str, list[int]] = {}
    for index, item in zip(images.indices, dpg_items(images), strict=True):
        items.setdefault(item, []).append(index)
    return items


def check_layout(images: ImageSet, items: Mapping[str, list[int]]) -> tuple[int, int]:
    """Return the side of the images and their number per item.

    Raises:
        ValueError: they are not squares of one size, or not equally many of every item, up to four.
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
    """Lay the images out: a picture for each item, named after it, with its images in rows of two."""
    shutil.rmtree(folder, ignore_errors=True)  # the program looks at whatever lies there
    folder.mkdir(parents=True)
    for item, indices in items.items():
        target = folder / f"{item}.png"
        if len(indices) == 1:
            images.export(indices[0], target)
        else:
            images.grid(indices).save(target, compress_level=1)


def read_results(path: Path) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return the score of every image (0 to 1) by item, and those of the categories (0 to 100) by name.

    Raises:
        ValueError: the file is not one of that program's, unfinished, or its total is not that of its lines.
    """
    text = path.read_text(encoding="utf-8")
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
            f"{path}: not what compute_dpg_bench.py writes once it is done: a line for every picture and, last, "
            "`DPG-Bench score: ...`"
        )
    if abs(float(total["value"]) - 100 * np.mean([np.mean(each) for each in scores.values()])) > 1e-4:
        raise ValueError(f"{path}: its DPG-Bench score {total['value']} is not the mean of its lines")
    summary = text.partition("L1 category scores:\n")[2].partition("L2 category scores:")[0]
    return scores, {match["name"]: float(match["value"]) for match in CATEGORY.finditer(summary)}


def check_results(
    path: Path, found: Mapping[str, list[float]], items: Mapping[str, list[int]], count: int
) -> str | None:
    """Return the one item that may be missing, None if none is.

    Raises:
        ValueError: the scores are of other items, of another number of images, or more than one item is missing.
    """
    if unknown := [item for item in found if item not in items]:
        raise ValueError(f"{path}: {unknown[0]} is not an item of this run ({len(unknown)} are not)")
    if wrong := [item for item, scores in found.items() if len(scores) != count]:
        raise ValueError(
            f"{path}: {len(found[wrong[0]])} scores of {wrong[0]}, which has {count} images (--pic-num {count})"
        )
    absent = [item for item in items if item not in found]
    if len(absent) > 1:
        raise ValueError(
            f"{path}: no scores of {', '.join(absent[:5])} ({len(absent)} of {len(items)} items are missing)"
        )
    return absent[0] if absent else None
