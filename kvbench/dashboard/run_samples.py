"""Prompts, seeds and values of the samples of each run, read from its records once and cached for the page."""

import base64
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbench.core.files import hash_path, hash_values, parse_json, read_bytes
from kvbench.core.kept import FileCache
from kvbench.dashboard.datasets import AddedRun
from kvbench.dashboard.folders import read_lines
from kvbench.eval.files.kinds import IMAGES, TEXTS, find_stored_kind
from kvbench.report.runs_table import find_metric
from kvbench.runs.record.folder import RECORDS
from kvbench.runs.record.results import FILE, Results

KEPT = ".samples.kept"
"""Cache file under `runs_dir` with the samples of all runs."""
MAX_INDEX = 10**6
"""Sample index from which a record is ignored as damaged."""

Floats = NDArray[np.float64]
Drawn = tuple[tuple[object, object], ...]
"""Prompt and seed of every sample by index; both None for a missing sample."""


@dataclass(frozen=True)
class RunSamples:
    """Samples of a run.

    Attributes:
        kind: kind of the samples, such as images or texts.
        drawn: prompt and seed of every sample, the same object for runs with the same samples.
        answers: right answer by index; empty unless samples are texts.
        values: float64 [samples] by metric; NaN where there is none.
        strata: group of every sample, by metric, for metrics that are means of group means.
        samples: folder of the samples' files.
    """

    kind: str
    drawn: Drawn
    answers: Mapping[int, object]
    values: Mapping[str, Floats]
    strata: Mapping[str, list[str | None]]
    samples: Path


class SamplesCache:
    """Samples of the runs below a folder, cached in one file of it."""

    def __init__(self, runs_dir: Path) -> None:
        self._runs_dir = runs_dir
        self._kept = FileCache(runs_dir / KEPT, hash_path(Path(__file__)))
        self._drawn: dict[str, Drawn] = {}

    def read(self, folder: Path, run: Results) -> RunSamples:
        """Return the samples of a run; damaged lines of its records are left out."""
        stems = _list_stems(run)
        files = [folder / FILE, folder / RECORDS]
        files += [
            folder / "metrics" / f"{stem}{end}" for stem in stems for end in (".samples.jsonl", ".json")
        ]
        name = folder.relative_to(self._runs_dir).as_posix()
        entry = self._kept.get(name, files, lambda: _make_entry(folder, stems))
        return RunSamples(
            kind=entry["kind"],
            drawn=self._find_drawn(entry["drawn"], folder),
            answers={int(index): answer for index, answer in entry["answers"].items()},
            values={
                key: np.frombuffer(base64.b64decode(entry["values"][key]))
                for key in run.metrics
                if key in entry["values"]
            },
            strata=entry["strata"],
            samples=folder / entry["kind"],
        )

    def save(self) -> None:
        """Write what was read into the cache file, for the next page."""
        self._kept.save()

    def _find_drawn(self, digest: str, folder: Path) -> Drawn:
        """Return prompts and seeds, the same object for all runs that share them."""
        if digest not in self._drawn:
            pairs = self._kept.get(f"drawn {digest}", (), lambda: _list_drawn(_by_index(folder / RECORDS)))
            self._drawn[digest] = tuple((prompt, seed) for prompt, seed in pairs)
        return self._drawn[digest]


def read_added(folder: Path, entry: AddedRun) -> RunSamples:
    """Return the samples of a run of a dataset, whose values are in the dataset's table; groups are not published."""
    records = _by_index(folder / RECORDS)
    rows = {index: row for index, row in entry.rows.items() if index in records}
    columns = {name: _make_column(rows, name) for name in entry.results.metrics}
    return RunSamples(
        kind=entry.kind,
        drawn=tuple((prompt, seed) for prompt, seed in _list_drawn(records)),
        answers=_find_answers(entry.kind, records),
        values={name: column for name, column in columns.items() if column is not None},
        strata={},
        samples=entry.samples,
    )


def _list_stems(run: Results) -> dict[str, list[str]]:
    """Return the metrics with a value by the stem of the file with their values per sample."""
    stems: dict[str, list[str]] = {}
    for name in run.metrics:
        metric = find_metric(run, name)
        if metric is not None and metric.value is not None:
            stems.setdefault(f"{metric.evaluator}-{metric.protocol}", []).append(name)
    return stems


def _make_entry(folder: Path, stems: Mapping[str, list[str]]) -> dict[str, object]:
    kind, records = (find_stored_kind(folder) or IMAGES).kind, _by_index(folder / RECORDS)
    values: dict[str, str] = {}
    strata: dict[str, list[str | None]] = {}
    for stem, names in stems.items():
        rows = _by_index(folder / "metrics" / f"{stem}.samples.jsonl")
        for name in names:
            if (column := _make_column(rows, name)) is not None:
                values[name] = base64.b64encode(column.tobytes()).decode()
        for name, group in _find_strata(folder / "metrics" / f"{stem}.json", rows):
            if name in values:
                strata[name] = [str(row[group]) if group in row else None for row in _spread(rows)]
    answers, digest = _find_answers(kind, records), hash_values(_list_drawn(records))
    return {"kind": kind, "drawn": digest, "answers": answers, "values": values, "strata": strata}


def _find_answers(kind: str, records: Mapping[int, Mapping[str, Any]]) -> dict[int, object]:
    """Return the right answer of every text that has one."""
    metas = ((index, record.get("meta")) for index, record in records.items() if kind == TEXTS.kind)
    return {i: meta["answer"] for i, meta in metas if isinstance(meta, Mapping) and "answer" in meta}


def _make_column(rows: Mapping[int, Mapping[str, object]], name: str) -> Floats | None:
    """Return a metric's finite values by index, float64 [samples], NaN where there is none; None if all are missing."""
    cells = [row.get(name) for row in rows.values()]
    values = [cell if isinstance(cell, int | float) else None for cell in cells]
    array, indices = np.array(values, np.float64), np.array(list(rows), np.int64)
    known = np.isfinite(array)
    if not known.any():
        return None
    column = np.full(int(indices[known].max()) + 1, np.nan)
    column[indices[known]] = array[known]
    return column


def _find_strata(path: Path, rows: Mapping[int, Mapping[str, object]]) -> Iterator[tuple[str, str]]:
    """Yield the metrics of an evaluator that are means of group means, with the column of the groups."""
    first = next(iter(rows.values()), {})
    if not any(isinstance(value, str) for value in first.values()):
        return  # without groups the file of scores is not needed
    try:
        scores = parse_json(read_bytes(path))["scores"]
        for name, score in scores.items():
            if isinstance(score.get("strata"), str):
                yield name, score["strata"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return


def _by_index(path: Path) -> dict[int, Mapping[str, Any]]:
    """Return the lines of a file by their sample index; lines without a valid one are left out."""
    return {
        index: line
        for line in read_lines(path)
        if type(index := line.get("index")) is int and 0 <= index < MAX_INDEX
    }


def _spread(lines: Mapping[int, Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return lines in the order of indices, with empty lines for missing indices."""
    return [lines.get(index, {}) for index in range(max(lines, default=-1) + 1)]


def _list_drawn(records: Mapping[int, Mapping[str, Any]]) -> list[list[object]]:
    return [[record.get("prompt"), record.get("seed")] for record in _spread(records)]
