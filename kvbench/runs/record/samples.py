"""Samples of a finished run: their records, files and metrics."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvbench.core.config import ConfigError
from kvbench.eval.files.kinds import IMAGES, find_stored_kind
from kvbench.eval.protocol.compare import read_rows
from kvbench.runs.record.folder import RECORDS, read_records
from kvbench.runs.record.results import FILE, Results, read_results

SCORES = ".samples.jsonl"
"""Suffix of evaluators' per-sample files in a run's `metrics`."""
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
            f"{folder / RECORDS}: has {count} records, {FILE} has n = {results.n}; start the run again to "
            "generate what is missing, or copy its folder again"
        )
    return results


def find_sample(folder: Path, index: int) -> Path:
    """Return the path of a sample of a run."""
    return (find_stored_kind(folder) or IMAGES).find(folder, index)


def read_scores(folder: Path, results: Results) -> dict[int, Scores]:
    """Return the metrics of every sample by its index, in the order of the run's metrics.

    Other columns of evaluators are left out.

    Raises:
        ConfigError: see `read_values`.
    """
    values: dict[int, dict[str, float | None]] = {}
    for index, row in read_values(folder, results):
        scores = values.setdefault(index, {})
        for name in results.metrics.keys() & row.keys():
            scores[name] = None if row[name] is None else float(row[name])
    return {
        index: {name: scores[name] for name in results.metrics if name in scores}
        for index, scores in sorted(values.items())
    }


def read_values(folder: Path, results: Results) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield indices of samples and their columns in the files of evaluators, file by file.

    Raises:
        ConfigError: a file is damaged, or has fewer values of a metric than its n in results.json.
    """
    for path in sorted((folder / "metrics").glob(f"*{SCORES}")):
        try:
            rows = read_rows(path)
            if wrong := [index for index in rows if not 0 <= index < results.n]:
                raise ValueError(f"index {wrong[0]}: there are {results.n} samples")
            for name in set().union(*rows.values()) & results.metrics.keys():
                count = sum(isinstance(row.get(name, ""), int | float | None) for row in rows.values())
                if count < results.metrics[name].n:
                    raise ValueError(f"{count} values of {name}, whose n is {results.metrics[name].n}")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{path}: damaged ({type(error).__name__} {error}); delete {FILE} and run it again: samples are kept"
            ) from None
        yield from rows.items()


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
