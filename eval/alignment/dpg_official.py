"""DPG-Bench by its official code (mPLUG): export of images, import of its scores."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from kvbench.core.files import read_text
from kvbench.eval.alignment.dpg import CATEGORIES, read_items
from kvbench.eval.files.images import ImageSet
from kvbench.eval.files.samples import group_indices
from kvbench.eval.protocol.official import Groups, Imported, OfficialProgram, check_names
from kvbench.eval.protocol.scores import MetricSpec, Score, share_score

MAX_IMAGES = 4
"""Maximum number of images of an item: the official code cuts one picture into quarters."""
LINE = re.compile(r"(?P<path>.+\.png), (?P<scores>[0-9.e+-]+(?:, [0-9.e+-]+)+)")
"""Line of the official code's output: path of the item's picture, score of each image, mean of the scores."""
TOTAL = re.compile(r"DPG-Bench score: (?P<value>[0-9.e+-]+)")
CATEGORY = re.compile(r"\t(?P<name>[^\t:]+): (?P<value>[0-9.e+-]+)")


@dataclass(frozen=True)
class DpgOfficial(OfficialProgram):
    """`dpg[official]`: scores of compute_dpg_bench.py (modelscope's mPLUG), which needs a GPU and its own environment.

    The code reads one picture for each item. With `scores` its output is read: the score of each image, and the scores
    of the categories, which it computes from each item's last image.

    The code skips the first question of its table and drops the item with questions that depend on it. One item may
    therefore be missing; a caveat names it.

    Attributes:
        scores: read the scores.
    """

    scores: bool = False
    folder: ClassVar[str] = "dpg_official"
    results: ClassVar[str] = "results.txt"
    steps: ClassVar[str] = (
        "in ELLA's environment run: python dpg_bench/compute_dpg_bench.py --image-root-path {folder}/images "
        "--resolution {side} --pic-num {count} --res-path {path}"
    )
    name: ClassVar[str] = "dpg"
    protocol: ClassVar[str] = "official"
    meta_keys: ClassVar[tuple[str, ...]] = ("item_id",)
    spec: ClassVar[MetricSpec] = MetricSpec("higher", digits=2)
    part_names: ClassVar[tuple[str, ...]] = CATEGORIES

    def group(self, images: ImageSet) -> Groups:
        """Return the images of each item.

        Raises:
            ValueError: images are not squares of one size, or items have different numbers of them, or more than four.
        """
        sizes = {images.samples[index].size for index in images.indices}
        if len(sizes) > 1 or min(sizes)[0] != min(sizes)[1]:
            raise ValueError(f"the official code needs square images of one size, not {sorted(sizes)}")
        items = group_indices(images.indices, read_items(images))
        counts = sorted({len(indices) for indices in items.values()})
        if len(counts) > 1 or max(counts) > MAX_IMAGES:
            raise ValueError(
                f"the official code needs equal numbers of images of every item, at most {MAX_IMAGES}, not "
                f"{', '.join(map(str, counts))} (prompts.per_prompt)"
            )
        return items

    def read(self, images: ImageSet, groups: Groups, path: Path) -> Imported:
        """Return the scores of images and categories from the official code's output."""
        results, categories = read_results(path)
        missing = check_names(path, results, groups, spare=1)
        judged = {item: results[item] for item in groups if item in results}
        for item, scores in judged.items():
            if len(scores) != (count := len(groups[item])):
                raise ValueError(
                    f"{path}: {item} has {len(scores)} scores but {count} images; use --pic-num {count}"
                )
        columns: dict[str, list[object]] = {
            "index": [index for item in judged for index in groups[item]],
            "item_id": [item for item in judged for _ in groups[item]],
            self.metric: [100 * score for scores in judged.values() for score in scores],
        }
        means = [100 * float(np.mean(scores)) for scores in judged.values()]
        whole = {self.metric: share_score(means, whole=100)}
        for category in CATEGORIES:
            if category in categories:
                whole[f"{self.metric}/{category}"] = Score(categories[category], len(judged))
        caveat = f"left out by the official code: {missing[0]}" if missing else None
        return whole, columns, caveat


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
                raise ValueError(f"{path}, line {number}: {item} appears twice; make the file again")
            if abs(mean - float(np.mean(each))) > 1e-6 or not 0 <= min(each) <= max(each) <= 1:
                raise ValueError(f"{path}, line {number}: {mean} is not the mean of scores from 0 to 1")
            scores[item] = each
    total = TOTAL.search(text)
    if not scores or total is None:
        raise ValueError(
            f"{path}: not the output of a finished compute_dpg_bench.py: lines of pictures, then `DPG-Bench score: ...`"
        )
    if abs(float(total["value"]) - 100 * np.mean([np.mean(each) for each in scores.values()])) > 1e-4:
        raise ValueError(f"{path}: score {total['value']} is not the mean of its lines; make it again")
    summary = text.partition("L1 category scores:\n")[2].partition("L2 category scores:")[0]
    return scores, {match["name"]: float(match["value"]) for match in CATEGORY.finditer(summary)}
