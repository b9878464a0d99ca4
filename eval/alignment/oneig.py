"""OneIG-Bench (arXiv:2506.07977) by its official code: export of images, import of its tables."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from kvbench.eval.protocol.scores import MetricSpec, Score, jackknife_score, mean_score, share_score

MODEL = "kvbench"
"""Name of the image folders and of the column in the official code's tables."""
CLASSES = ("anime", "human", "object", "text", "reasoning")
TEXTS_FILE = "text_content.csv"
MAX_DISTANCE = 100.0
"""Edit distance at which the official code clips, for English."""
IGNORED_CHARACTERS = re.compile(r"[^\sa-zA-Z0-9àâäéèêëîïôöùûüçÀÂÄÉÈÊËÎÏÔÖÙÛÜÇ]")
"""Characters that the official code removes from a text before it counts words."""

Key = tuple[str, str]
"""Class of a prompt and its number in the class."""
Average = Callable[[Sequence[float], Sequence[str]], Score]


@dataclass(frozen=True)
class OneIgPart:
    """Scores written by one script of the official code.

    Attributes:
        total: column of the overall score.
        classes: scored classes of prompts.
        named: whether the table names a prompt `<class>_<number>` instead of `<number>`.
        partial: whether some prompts may have no score.
    """

    total: str
    classes: tuple[str, ...]
    named: bool = False
    partial: bool = False


PARTS = {
    "alignment": OneIgPart("alignment", CLASSES[:3], named=True),
    "text": OneIgPart("text score", ("text",)),
    "reasoning": OneIgPart("reasoning", ("reasoning",)),
    "style": OneIgPart("style", ("anime",), partial=True),
    "diversity": OneIgPart("total average", CLASSES, named=True),
}


@dataclass(frozen=True)
class OneIg(OfficialProgram):
    """`oneig_<part>[official]`: alignment, text, reasoning, style and diversity, from 0 to 1, by OneIG-Bench's code.

    The images of each prompt are exported as one lossless WebP grid. With `scores` the code's tables are read; parts
    without tables are left out. The benchmark has no overall score.

    The text score is not a mean over prompts: the code sums the words of all images before it divides. Its jackknife
    interval needs the number of words of each prompt, which is counted in the code's file of texts.

    Attributes:
        scores: read the official code's tables, instead of exporting images for it.
    """

    scores: bool = False
    folder: ClassVar[str] = "oneig"
    results: ClassVar[str] = "results"
    picture: ClassVar[str] = f"images/{{0[0]}}/{MODEL}/{{0[1]}}.webp"
    steps: ClassVar[str] = (
        'in run_overall.sh of OneIG-Benchmark set MODE=EN, IMAGE_DIR="{folder}/images", '
        f'MODEL_NAMES=("{MODEL}") and IMAGE_GRIDS=("{{grid}}"), run it in its environment, copy the tables that it '
        f"writes (results/*.csv) and scripts/text/{TEXTS_FILE} to {{path}}"
    )
    name: ClassVar[str] = "oneig"
    revision: ClassVar[int] = 1
    protocol: ClassVar[str] = "official"
    required_meta: ClassVar[str] = "oneig_id"
    meta_keys: ClassVar[tuple[str, ...]] = ("oneig_class", "oneig_id")
    metrics: ClassVar[Mapping[str, MetricSpec]] = {
        f"oneig_{part}[official]": MetricSpec("higher", digits=3) for part in PARTS
    }

    def group(self, images: ImageSet) -> Groups:
        """Return the images of each prompt, by its class and number.

        Raises:
            SkipEvaluation: the prompts are not from the benchmark.
            ValueError: prompts have different numbers of images.
        """
        what, where = "OneIG number", "(oneig_class, oneig_id): use prompts=oneig"
        kinds, numbers = (read_meta(images, key, what, where) for key in ("oneig_class", "oneig_id"))
        prompts = group_indices(images.indices, zip(map(str, kinds), map(str, numbers), strict=True))
        counts = sorted({len(indices) for indices in prompts.values()})
        if len(counts) > 1:
            raise ValueError(f"prompts have {counts} images; give all the same number (prompts.per_prompt)")
        return prompts

    def read(self, images: ImageSet, groups: Groups, path: Path) -> Imported:
        """Return the scores of all parts that have a table in the folder `path`.

        Raises:
            ValueError: no part has a table, a cell is malformed, or the prompts do not give the overall score.
        """
        columns: dict[str, Sequence[object]] = {"index": [indices[0] for indices in groups.values()]}
        scores: dict[str, Score] = {}
        for name, part in PARTS.items():
            if (table := read_part(path, name, part, groups)) is None:
                continue
            cells, whole = table
            clusters = [images.samples[groups[key][0]].cluster for key in cells]
            if name == "text":
                score, by_column = score_texts(cells, clusters, path)
            else:
                values = {key: float(cell) for key, cell in cells.items()}
                average: Average = share_score if name == "alignment" else mean_score
                score, by_column = (
                    average(list(values.values()), clusters),
                    {f"oneig_{name}[official]": values},
                )
            if score.value is None or not abs(score.value - whole) < 1e-6:
                given = f"the prompts' {name} gives {score.value}"
                raise ValueError(f"{path}: {given}, the official total is {whole}; make it again")
            scores[f"oneig_{name}[official]"] = score
            for column, of_prompts in by_column.items():
                columns[column] = [of_prompts.get(key, math.nan) for key in groups]
        if not scores:
            raise ValueError(f"{path}: no table of scores; {self.instruct(images, groups, path.parent)}")
        missing = [name for name in PARTS if f"oneig_{name}[official]" not in scores]
        return scores, columns, f"no scores of {', '.join(missing)}" if missing else None


def read_part(
    folder: Path, name: str, part: OneIgPart, prompts: Groups
) -> tuple[dict[Key, str], float] | None:
    """Return the cell of each scored prompt and the overall score; None if a table is missing or has no scores.

    Raises:
        ValueError: a table exists twice, lacks a column, or has other prompts than the run.
    """
    path = find_table(folder, f"{name}_prompt_score_EN_*.csv")
    whole = find_table(folder, f"{name}_score_EN_*.csv")
    if path is None or whole is None:
        return None
    keys = {"_".join(key) if part.named else key[1]: key for key in prompts if key[0] in part.classes}
    cells = {row: cell for row, cell in read_column(path, MODEL).items() if cell}
    if cells:
        check_names(path, cells, keys, spare=len(keys) if part.partial else 0)
    scored = {keys[row]: cell for row, cell in cells.items()}
    totals = read_column(whole, part.total)
    if MODEL not in totals:
        raise ValueError(f"{whole}: no row {MODEL}; make the table again")
    return (scored, float(totals[MODEL])) if scored else None


def find_table(folder: Path, pattern: str) -> Path | None:
    """Return the only file that matches a pattern, or None; raise a ValueError if several do."""
    files = sorted(folder.glob(pattern))
    if len(files) > 1:
        raise ValueError(f"{folder}: {' and '.join(file.name for file in files)}; keep one of them")
    return files[0] if files else None


def read_column(path: Path, column: str, key: str = "") -> dict[str, str]:
    """Return a column of a table by the entries of column `key`, by default the column without a name."""
    return {row[key]: row[column] for row in read_table(path, (key, column))}


def score_texts(
    cells: Mapping[Key, str], clusters: Sequence[str], folder: Path
) -> tuple[Score, dict[str, dict[Key, float]]]:
    """Return the text score 1 - min(ED, 100) (1 - CR) (1 - WAC) / 100, and the three values of each prompt.

    ED is the mean edit distance of images, CR the share without error, WAC the share of all words that are legible.

    Args:
        cells: JSON list of the three means over a prompt's images, by prompt.
        clusters: prompt of each cell.
        folder: location of the official code's file of texts, `TEXTS_FILE`.

    Raises:
        FileNotFoundError: the file is missing.
        ValueError: a text is missing in it.
    """
    path = folder / TEXTS_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: copy scripts/text/{TEXTS_FILE} of OneIG-Benchmark to it")
    texts = read_column(path, "text_content", key="id")
    if missing := [number for _, number in cells if number not in texts]:
        raise ValueError(f"{path}: no text of prompt {missing[0]}; copy it again")
    plain = [IGNORED_CHARACTERS.sub("", texts[number]) for _, number in cells]
    words = np.array([len(text.split()) for text in plain], np.float64)
    rows: NDArray[np.float64] = np.array([json.loads(cell) for cell in cells.values()], np.float64)

    def score(positions: NDArray[np.int64]) -> float:
        distance, complete = rows[positions, :2].mean(0)
        share = (rows[positions, 2] * words[positions]).sum() / words[positions].sum()
        return float(1 - min(distance, MAX_DISTANCE) * (1 - complete) * (1 - share) / MAX_DISTANCE)

    names = ("edit_distance", "complete", "word_accuracy")
    columns = zip(names, rows.T.tolist(), strict=True)
    by_column = {name: dict(zip(cells, column, strict=True)) for name, column in columns}
    return jackknife_score(score, clusters), by_column
