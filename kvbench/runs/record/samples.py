"""Samples of a finished run: file and metrics of each."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

from kvbench.runs.record.kinds import IMAGES, TEXTS, SampleKind
from kvbench.runs.record.results import Results

Scores = Mapping[str, float | None]
"""Values of one sample by metric; None where it has none, such as the PSNR of equal images."""


def find_stored_kind(folder: Path) -> SampleKind:
    """Return how a run keeps its samples: as texts where it has a folder of them, else as images."""
    return TEXTS if (folder / TEXTS.kind).is_dir() else IMAGES


def find_sample(folder: Path, index: int) -> Path:
    """Return the file of a sample of a run."""
    return find_stored_kind(folder).find(folder, index)


def read_scores(folder: Path, results: Results) -> dict[int, Scores]:
    """Return the values of every sample by its index, those of each metric that has a value per sample.

    What evaluators note beside their metrics is left out.

    Args:
        folder: the run.
        results: of the run; scores have the order of its metrics.
    """
    found: dict[int, dict[str, float | None]] = {}
    for path in sorted((folder / "metrics").glob("*.samples.jsonl")):
        for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            scores = found.setdefault(row["index"], {})
            for name in results.metrics.keys() & row.keys():
                scores[name] = None if row[name] is None else float(row[name])
    return {
        index: {name: scores[name] for name in results.metrics if name in scores}
        for index, scores in sorted(found.items())
    }


def order_worst_first(results: Results, scores: Mapping[int, Scores]) -> list[int]:
    """Return the indices of samples, the most changed by compression first.

    The run's first metric that compares with the reference decides, or of the reference itself its first metric; a
    sample without a value of it is taken for unchanged. Equal ones stand by index.
    """
    there = {name for one in scores.values() for name in one}
    chosen = [name for name in results.metrics if name in there]
    if not chosen:
        return sorted(scores)
    name = next((name for name in chosen if results.metrics[name].needs_reference), chosen[0])
    sign = 1 if results.metrics[name].better == "higher" else -1

    def rank(index: int) -> tuple[float, int]:
        value = scores[index].get(name)
        return math.inf if value is None else sign * value, index

    return sorted(scores, key=rank)
