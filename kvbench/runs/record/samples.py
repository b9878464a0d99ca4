"""Samples of a finished run: their files and metrics."""

import math
from collections.abc import Mapping
from pathlib import Path

from kvbench.core.files import parse_json, read_text
from kvbench.eval.files.kinds import IMAGES, find_stored_kind
from kvbench.runs.record.results import Results

Scores = Mapping[str, float | None]
"""Values of one sample by metric; None if undefined, such as the PSNR of equal images."""


def find_sample(folder: Path, index: int) -> Path:
    """Return the path of a sample of a run."""
    return (find_stored_kind(folder) or IMAGES).find(folder, index)


def read_scores(folder: Path, results: Results) -> dict[int, Scores]:
    """Return the metrics of every sample by its index, in the order of the run's metrics.

    Other columns of evaluators are left out.
    """
    values: dict[int, dict[str, float | None]] = {}
    for path in sorted((folder / "metrics").glob("*.samples.jsonl")):
        for row in map(parse_json, read_text(path).splitlines()):
            scores = values.setdefault(row["index"], {})
            for name in results.metrics.keys() & row.keys():
                scores[name] = None if row[name] is None else float(row[name])
    return {
        index: {name: scores[name] for name in results.metrics if name in scores}
        for index, scores in sorted(values.items())
    }


def order_worst_first(results: Results, scores: Mapping[int, Scores]) -> list[int]:
    """Return the indices of samples, the most changed by compression first.

    The order is that of the run's first metric that compares with the reference, or of a reference's first metric. A
    sample without a value counts as unchanged; ties are ordered by index.
    """
    scored = {name for one in scores.values() for name in one}
    names = [name for name in results.metrics if name in scored]
    if not names:
        return sorted(scores)
    name = next((name for name in names if results.metrics[name].needs_reference), names[0])
    sign = 1 if results.metrics[name].better == "higher" else -1

    def rank(index: int) -> tuple[float, int]:
        value = scores[index].get(name)
        return math.inf if value is None else sign * value, index

    return sorted(scores, key=rank)
