"""Samples of a finished run: their records, files and metrics."""

import math
from collections.abc import Mapping
from pathlib import Path

from kvbench.core.config import ConfigError
from kvbench.core.files import parse_json, read_text
from kvbench.eval.files.kinds import IMAGES, find_stored_kind
from kvbench.runs.record.folder import RECORDS, read_records
from kvbench.runs.record.results import FILE, Results, read_results

Scores = Mapping[str, float | None]
"""Values of one sample by metric; None if undefined, such as the PSNR of equal images."""


def read_finished(folder: Path) -> Results | None:
    """Read the results of a run folder, which has a record of each sample; None if there are none yet.

    Raises:
        ConfigError: results or records are damaged, or their numbers of samples differ.
    """
    results = read_results(folder)
    if results is not None and (count := len(read_records(folder))) != results.n:
        raise ConfigError(
            f"{folder / RECORDS}: has {count} records, {FILE} has n = {results.n}; start the run again, which "
            "draws what is missing, or copy its folder again"
        )
    return results


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
