"""OneIG-Bench (arXiv:2506.07977) judged by its authors' own program: images out in its layout, its tables in."""

import csv
import json
import math
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kvbench.eval.files.images import ImageSet
from kvbench.eval.files.weights import file_sha256
from kvbench.eval.protocol.base import Evaluator, Result, make_result, read_meta
from kvbench.eval.protocol.official import require_results
from kvbench.eval.protocol.scores import MetricSpec, Score, jackknife_score, mean_score, share_score

FOLDER = "oneig"
MODEL = "kvbench"
"""Name of the images' folders, and of the program's column."""
CLASSES = ("anime", "human", "object", "text", "reasoning")
TEXTS = "text_content.csv"
FURTHEST = 100.0
"""Edit distance from which the program counts no further, in English."""
DROPPED = re.compile(r"[^\sa-zA-Z0-9àâäéèêëîïôöùûüçÀÂÄÉÈÊËÎÏÔÖÙÛÜÇ]")
"""Characters that the program takes out of a text before it counts words."""

Key = tuple[str, str]
"""Class and number of a prompt."""
Average = Callable[[Sequence[float], Sequence[str]], Score]


@dataclass(frozen=True)
class Part:
    """Scores that one of the program's scripts writes.

    Attributes:
        total: column of the whole score.
        classes: classes of the prompts that it scores.
        named: whether its table names a prompt `<class>_<number>`; otherwise by the number.
        partial: whether it leaves out some prompts.
    """

    total: str
    classes: tuple[str, ...]
    named: bool = False
    partial: bool = False


PARTS = {
    "alignment": Part("alignment", CLASSES[:3], named=True),
    "text": Part("text score", ("text",)),
    "reasoning": Part("reasoning", ("reasoning",)),
    "style": Part("style", ("anime",), partial=True),
    "diversity": Part("total average", CLASSES, named=True),
}


@dataclass(frozen=True)
class OneIg(Evaluator):
    """`oneig_<part>[official]`: alignment, text, reasoning, style and diversity, from 0 to 1, by OneIG-Bench's program.

    First the images are laid out in the run's folder, one picture a prompt with its images in rows of two, as lossless
    WebP, and the result says which commands to run; then, with `scores`, the tables are read that the program wrote.
    A part without tables is left out. The benchmark has no overall score.

    The score of texts is no mean over prompts: the program adds the words of all images before it divides. Its interval
    comes from leaving out prompts, for which the number of words of each is counted in the program's own file of texts.

    Attributes:
        scores: read the tables.
    """

    scores: bool = False
    name: ClassVar[str] = "oneig"
    protocol: ClassVar[str] = "official"
    asks: ClassVar[str] = "oneig_id"
    metrics: ClassVar[Mapping[str, MetricSpec]] = {
        f"oneig_{part}[official]": MetricSpec("higher", digits=3) for part in PARTS
    }

    def run(self, samples: ImageSet, reference: ImageSet | None, device: str) -> Result:
        """Export the images, or import their scores; reference and device are not used."""
        prompts = group_prompts(samples)
        folder = samples.folder.resolve() / FOLDER
        path = folder / "results"
        command = (
            f'in run_overall.sh of OneIG-Benchmark set MODE=EN, IMAGE_DIR="{folder / "images"}", '
            f'MODEL_NAMES=("{MODEL}") and IMAGE_GRIDS=("{read_grid(prompts)}"), run it in its environment, copy '
            f"the tables that it writes (results/*.csv) and scripts/text/{TEXTS} to {path}"
        )
        require_results(
            path,
            command,
            "eval.oneig.scores",
            wanted=self.scores,
            export=lambda: export(samples, prompts, folder / "images"),
        )
        columns: dict[str, Sequence[object]] = {"index": [indices[0] for indices in prompts.values()]}
        scores: dict[str, Score] = {}
        for name, part in PARTS.items():
            if found := read_part(path, name, part, prompts):
                score, more = score_part(name, found, path, samples, prompts)
                scores[f"oneig_{name}[official]"] = score
                columns |= {
                    column: [values.get(key, math.nan) for key in prompts] for column, values in more.items()
                }
        if not scores:
            raise ValueError(f"{path}: no table of scores; {command}")
        absent = [name for name in PARTS if f"oneig_{name}[official]" not in scores]
        caveat = f"no scores of {', '.join(absent)}" if absent else None
        return make_result(
            self, scores, columns, {file.name: file_sha256(file) for file in path.glob("*.csv")}, caveat
        )


def group_prompts(images: ImageSet) -> dict[Key, list[int]]:
    """Return the images of each prompt, in the order of their indices.

    Raises:
        SkipEvaluation: the prompts are not the benchmark's.
        ValueError: there are not equally many images of every prompt.
    """
    what, where = "OneIG number", "(oneig_class, oneig_id): use prompts=oneig"
    read = (read_meta(images, key, what, where) for key in ("oneig_class", "oneig_id"))
    prompts: dict[Key, list[int]] = {}
    for index, one, number in zip(images.indices, *read, strict=True):
        prompts.setdefault((str(one), str(number)), []).append(index)
    counts = sorted({len(indices) for indices in prompts.values()})
    if len(counts) > 1:
        raise ValueError(
            f"the official program wants equally many images of every prompt, not {counts} (prompts.per_prompt)"
        )
    return prompts


def read_grid(prompts: Mapping[Key, Sequence[int]]) -> str:
    """Return columns and rows of a prompt's picture, as the program wants them."""
    count = len(next(iter(prompts.values())))
    return f"{min(count, 2)},{math.ceil(count / 2)}"


def export(images: ImageSet, prompts: Mapping[Key, Sequence[int]], folder: Path) -> None:
    """Lay the images out, `<class>/<model>/<number>.webp`; the program passes over the black cell of an odd number."""
    shutil.rmtree(folder, ignore_errors=True)
    for (one, number), indices in prompts.items():
        target = folder / one / MODEL / f"{number}.webp"
        target.parent.mkdir(parents=True, exist_ok=True)
        images.grid(indices).save(target, lossless=True, method=0)


def read_part(
    folder: Path, name: str, part: Part, prompts: Mapping[Key, Sequence[int]]
) -> tuple[dict[Key, str], float] | None:
    """Return the cell of each scored prompt and the whole score; None if there is no table, or no score in it.

    Raises:
        ValueError: a table is there twice or not the program's, or its prompts are not those of the run.
    """
    path = find_table(folder, f"{name}_prompt_score_EN_*.csv")
    whole = find_table(folder, f"{name}_score_EN_*.csv")
    if path is None or whole is None:
        return None
    wanted = {"_".join(key) if part.named else key[1]: key for key in prompts if key[0] in part.classes}
    cells = {row: cell for row, cell in read_column(path, MODEL).items() if cell}
    if unknown := [row for row in cells if row not in wanted]:
        raise ValueError(f"{path}: {unknown[0]} is not a prompt of this run ({len(unknown)} are not)")
    absent = [row for row in wanted if row not in cells]
    if absent and cells and not part.partial:
        raise ValueError(f"{path}: no score of {absent[0]} ({len(absent)} of {len(wanted)} are missing)")
    found = {wanted[row]: cell for row, cell in cells.items()}
    totals = read_column(whole, part.total)
    if MODEL not in totals:
        raise ValueError(f"{whole}: no row {MODEL}")
    return (found, float(totals[MODEL])) if found else None


def find_table(folder: Path, pattern: str) -> Path | None:
    """Return the one file of a pattern, None if there is none.

    Raises:
        ValueError: there are several.
    """
    files = sorted(folder.glob(pattern))
    if len(files) > 1:
        raise ValueError(f"{folder}: {' and '.join(file.name for file in files)}; leave one of them")
    return files[0] if files else None


def read_column(path: Path, column: str, key: str = "") -> dict[str, str]:
    """Return a column of a table by the entries of another, by default of the one without a name.

    Raises:
        ValueError: the table lacks a column.
    """
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if absent := [name for name in (key, column) if name not in (reader.fieldnames or ())]:
            raise ValueError(f"{path}: no column {absent[0]!r}, as OneIG-Bench's program writes it")
        return {row[key]: row[column] for row in reader}


def score_part(
    name: str,
    found: tuple[Mapping[Key, str], float],
    folder: Path,
    images: ImageSet,
    prompts: Mapping[Key, Sequence[int]],
) -> tuple[Score, dict[str, dict[Key, float]]]:
    """Return the score of a part and the values of its prompts by column.

    Raises:
        ValueError: a cell cannot be read, or the prompts do not make the whole score.
    """
    cells, whole = found
    clusters = [images.samples[prompts[key][0]].cluster for key in cells]
    if name == "text":
        score, columns = score_texts(cells, clusters, folder)
    else:
        values = {key: float(cell) for key, cell in cells.items()}
        average: Average = share_score if name == "alignment" else mean_score
        score, columns = average(list(values.values()), clusters), {f"oneig_{name}[official]": values}
    if score.value is None or not abs(score.value - whole) < 1e-6:
        raise ValueError(
            f"{folder}: the prompts' {name} gives {score.value}, and the program's total is {whole}"
        )
    return score, columns


def score_texts(
    cells: Mapping[Key, str], clusters: Sequence[str], folder: Path
) -> tuple[Score, dict[str, dict[Key, float]]]:
    """Return the score of texts, 1 - min(ED, 100) (1 - CR) (1 - WAC) / 100, and the three of each prompt.

    ED is the mean edit distance of images, CR the share without error, WAC the share of all words that were read.

    Args:
        cells: the three as a list, mean over a prompt's images.
        clusters: prompt of each.
        folder: of the program's file of texts.

    Raises:
        FileNotFoundError: that file is not there.
        ValueError: it lacks a text.
    """
    path = folder / TEXTS
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there: copy scripts/text/{TEXTS} of OneIG-Benchmark to it")
    texts = read_column(path, "text_content", key="id")
    if absent := [number for _, number in cells if number not in texts]:
        raise ValueError(f"{path}: no text of prompt {absent[0]}")
    words = np.array([len(DROPPED.sub("", texts[number]).split()) for _, number in cells], np.float64)
    rows: NDArray[np.float64] = np.array([json.loads(cell) for cell in cells.values()], np.float64)

    def score(kept: NDArray[np.int64]) -> float:
        distance, complete = rows[kept, :2].mean(0)
        share = (rows[kept, 2] * words[kept]).sum() / words[kept].sum()
        return float(1 - min(distance, FURTHEST) * (1 - complete) * (1 - share) / FURTHEST)

    names = ("edit_distance", "complete", "word_accuracy")
    columns = {
        name: dict(zip(cells, rows[:, place].tolist(), strict=True)) for place, name in enumerate(names)
    }
    return jackknife_score(score, clusters), columns
