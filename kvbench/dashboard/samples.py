"""Samples for the comparison of two runs: the worst of each run by each metric, with prompts and texts."""

import base64
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from kvbench.dashboard.folders import read_lines
from kvbench.dashboard.pool import Pool
from kvbench.eval.protocol.scores import Better
from kvbench.report.runs_table import find_metric
from kvbench.runs.record.folder import RECORDS
from kvbench.runs.record.kinds import TEXTS
from kvbench.runs.record.results import Results
from kvbench.runs.record.samples import find_sample, find_stored_kind

MAX_SAMPLES, MIN_SAMPLES, MAX_ALTOGETHER = 100, 12, 40_000
"""Samples of a run by each metric: at most, however many runs there are, and of all runs together."""
MAX_TEXTS = 24
"""The same of a run whose samples are texts, which lie in the page itself."""
LETTERS = 12_000
"""Characters of a text beyond which its middle is left out."""
MAX_PAIRED = 2_000_000
"""Values per sample of all runs together, of 5 bytes each in the page, beyond which it has no paired differences."""

Values = Mapping[str, Mapping[int, float]]
"""By metric, what it gives each sample; samples without a finite value are left out."""


def list_samples(finished: Mapping[Path, Results], pool: Pool) -> dict[Path, dict[str, object]]:
    """Return the samples to show of every run, by folder.

    Each entry holds `kind` (images or texts), `index`, and parallel to it `prompt`, `answer` and `text` (numbers in the
    pool, the latter two of texts only) and `values` (by metric). For paired differences `drawn` is the number in the
    pool of all samples' prompts and seeds, and `columns` has by metric the values of all samples, float32 in base64,
    nan where there is none; only of metrics that are the mean of these values.

    Args:
        finished: results by folder.
        pool: receives prompts and texts.
    """
    share = max(MIN_SAMPLES, min(MAX_SAMPLES, MAX_ALTOGETHER // max(1, len(finished))))
    values = {folder: _read_values(folder, run) for folder, run in finished.items()}
    chosen = {
        folder: _choose(
            values[folder],
            run,
            min(share, MAX_TEXTS) if find_stored_kind(folder).kind == TEXTS.kind else share,
        )
        for folder, run in finished.items()
    }
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
        if (
            metric
            and metric.value is not None
            and math.isclose(mean, metric.value, rel_tol=1e-6, abs_tol=1e-9)
        ):
            numbers = np.array([column.get(index, math.nan) for index in range(run.n)], "<f4")
            packed[name] = base64.b64encode(numbers.tobytes()).decode()
    return packed


def _read_values(folder: Path, run: Results) -> Values:
    found: dict[str, dict[int, float]] = {}
    stems: dict[str, list[Mapping[str, object]]] = {}
    for name in run.metrics:
        metric = find_metric(run, name)
        if metric is None or metric.value is None:
            continue
        stem = f"{metric.evaluator}-{metric.protocol}"
        if stem not in stems:
            stems[stem] = read_lines(folder / "metrics" / f"{stem}.samples.jsonl")
        column = {line["index"]: line.get(name) for line in stems[stem] if type(line.get("index")) is int}
        numbers = {int(str(i)): float(v) for i, v in column.items() if _is_number(v)}  # type: ignore[arg-type]
        if numbers:
            found[name] = numbers
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _choose(values: Values, run: Results, count: int) -> set[int]:
    """Return the samples that are among the worst `count` by some metric."""
    worst = (_find_worst(column, run.metrics[name].better, count) for name, column in values.items())
    return set().union(*worst)


def _find_worst(column: Mapping[int, float], better: Better, count: int) -> Iterable[int]:
    sign = 1 if better == "higher" else -1
    return sorted(column, key=lambda index: (sign * column[index], index))[:count]


def _describe(folder: Path, count: int, indices: list[int], values: Values, pool: Pool) -> dict[str, object]:
    lines = read_lines(folder / RECORDS)
    records = {line.get("index"): line for line in lines}
    drawn = [
        (records.get(index, {}).get("prompt"), records.get(index, {}).get("seed")) for index in range(count)
    ]
    found: dict[str, object] = {
        "kind": find_stored_kind(folder).kind,
        "index": indices,
        "drawn": pool.add([(pool.add(prompt), seed) for prompt, seed in drawn]),
        "prompt": [pool.add(records.get(index, {}).get("prompt")) for index in indices],
        "values": {
            name: [_shorten(column.get(index)) for index in indices] for name, column in values.items()
        },
    }
    if found["kind"] == TEXTS.kind:
        found["text"] = [pool.add(_read_text(folder, index)) for index in indices]
        metas = (records.get(index, {}).get("meta") for index in indices)
        answers = [meta.get("answer") if isinstance(meta, Mapping) else None for meta in metas]
        found["answer"] = [pool.add(answer) for answer in answers]
    return found


def _shorten(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _read_text(folder: Path, index: int) -> str | None:
    try:
        text = find_sample(folder, index).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    if len(text) <= LETTERS:
        return text
    left_out = len(text) - LETTERS
    return f"{text[: LETTERS // 2]}\n[{left_out} characters are left out here]\n{text[-LETTERS // 2 :]}"
