"""Samples for the comparison of two runs: the worst samples of each run by metric, with prompts and texts."""

import base64
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from kvbench.dashboard.folders import read_lines
from kvbench.dashboard.pool import Pool
from kvbench.report.runs_table import find_metric
from kvbench.runs.record.folder import RECORDS
from kvbench.runs.record.kinds import TEXTS
from kvbench.runs.record.results import Results
from kvbench.runs.record.samples import find_sample, find_stored_kind

MAX_SAMPLES, MIN_SAMPLES, MAX_ALTOGETHER = 100, 12, 40_000
"""Number of samples of a run and metric, largest and smallest, and of all runs together."""
MAX_TEXTS = 24
"""Largest number for a run of texts, which are stored in the page."""
MAX_LETTERS = 12_000
"""Number of characters beyond which the middle of a text is left out."""
MAX_PAIRED = 2_000_000
"""Number of sample values of all runs, 5 bytes each, beyond which the page has no paired differences."""

Values = Mapping[str, Mapping[int, float]]
"""Values of samples by metric; samples without a finite value are left out."""


def list_samples(finished: Mapping[Path, Results], pool: Pool) -> dict[Path, dict[str, object]]:
    """Return the samples to show of every run, by folder.

    Each entry holds `kind` (images or texts), `index`, and in the same order `prompt`, `answer` and `text` (numbers in
    the pool; the latter two for texts only) and `values` (by metric). For paired differences, `drawn` is the number in
    the pool of the prompts and seeds of all samples, and `columns` holds the values of all samples by metric (float32
    in base64, nan for missing values), only of metrics that are the mean of their samples.
    """
    share = max(MIN_SAMPLES, min(MAX_SAMPLES, MAX_ALTOGETHER // max(1, len(finished))))
    values = {folder: _read_values(folder, run) for folder, run in finished.items()}
    chosen = {}
    for folder, run in finished.items():
        count = min(share, MAX_TEXTS) if find_stored_kind(folder).kind == TEXTS.kind else share
        chosen[folder] = _choose(values[folder], run, count)
    for folder, run in finished.items():
        reference = folder.parent / (run.reference or run.run)
        if reference in chosen:
            chosen[reference] = chosen[reference] | chosen[folder]
    paired = sum(len(column) for one in values.values() for column in one.values()) <= MAX_PAIRED
    return {
        folder: {
            **_describe(folder, finished[folder].n, sorted(indices), values[folder], pool),
            "columns": _pack_columns(finished[folder], values[folder]) if paired else {},
        }
        for folder, indices in chosen.items()
    }


def _pack_columns(run: Results, values: Values) -> dict[str, str]:
    packed = {}
    for name, column in values.items():
        metric = find_metric(run, name)
        mean = math.fsum(column.values()) / len(column)
        value = metric.value if metric else None
        if value is not None and math.isclose(mean, value, rel_tol=1e-6, abs_tol=1e-9):
            numbers = np.array([column.get(index, math.nan) for index in range(run.n)], "<f4")
            packed[name] = base64.b64encode(numbers.tobytes()).decode()
    return packed


def _read_values(folder: Path, run: Results) -> Values:
    columns: dict[str, dict[int, float]] = {}
    stems: dict[str, list[Mapping[str, object]]] = {}
    for name in run.metrics:
        metric = find_metric(run, name)
        if metric is None or metric.value is None:
            continue
        stem = f"{metric.evaluator}-{metric.protocol}"
        if stem not in stems:
            stems[stem] = read_lines(folder / "metrics" / f"{stem}.samples.jsonl")
        column = {line["index"]: line.get(name) for line in stems[stem] if type(line.get("index")) is int}
        numbers = {
            int(str(i)): float(v)
            for i, v in column.items()
            if isinstance(v, int | float) and math.isfinite(v)
        }  # type: ignore[arg-type]
        if numbers:
            columns[name] = numbers
    return columns


def _choose(values: Values, run: Results, count: int) -> set[int]:
    """Return the samples that are among the `count` worst by some metric."""
    worst: set[int] = set()
    for name, column in values.items():
        sign = 1 if run.metrics[name].better == "higher" else -1
        ordered = sorted((sign * value, index) for index, value in column.items())
        worst.update(index for _, index in ordered[:count])
    return worst


def _describe(folder: Path, count: int, indices: list[int], values: Values, pool: Pool) -> dict[str, object]:
    records = {line.get("index"): line for line in read_lines(folder / RECORDS)}
    every = [records.get(index, {}) for index in range(count)]
    chosen = [records.get(index, {}) for index in indices]
    entry: dict[str, object] = {
        "kind": find_stored_kind(folder).kind,
        "index": indices,
        "drawn": pool.add([(pool.add(record.get("prompt")), record.get("seed")) for record in every]),
        "prompt": [pool.add(record.get("prompt")) for record in chosen],
        "values": {
            name: [_shorten(column.get(index)) for index in indices] for name, column in values.items()
        },
    }
    if entry["kind"] == TEXTS.kind:
        entry["text"] = [pool.add(_read_text(folder, index)) for index in indices]
        metas = (record.get("meta") for record in chosen)
        entry["answer"] = [
            pool.add(meta.get("answer") if isinstance(meta, Mapping) else None) for meta in metas
        ]
    return entry


def _shorten(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _read_text(folder: Path, index: int) -> str | None:
    try:
        text = find_sample(folder, index).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    if len(text) <= MAX_LETTERS:
        return text
    left_out = len(text) - MAX_LETTERS
    return (
        f"{text[: MAX_LETTERS // 2]}\n[{left_out} characters are left out here]\n{text[-MAX_LETTERS // 2 :]}"
    )
