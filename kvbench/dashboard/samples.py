"""Samples for the comparison of two runs: the worst samples of each run by metric, with prompts and texts."""

import base64
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from kvbench.core.files import name_sample, read_text
from kvbench.dashboard.packed import pack_reading
from kvbench.dashboard.pool import Pool, shorten
from kvbench.dashboard.run_samples import Drawn, RunSamples
from kvbench.eval.files.kinds import IMAGES, READINGS, TEXTS
from kvbench.report.runs_table import find_metric
from kvbench.runs.record.results import Results

MAX_SAMPLES, MIN_SAMPLES, MAX_ALTOGETHER = 100, 12, 40_000
"""Maximum and minimum number of samples shown for a run and metric, and maximum for all runs together."""
MAX_TEXTS = 24
"""Maximum number of samples for a run of texts, whose characters are stored in the page."""
MAX_LETTERS = 12_000
"""Number of characters above which the middle of a text is left out."""
MAX_PAIRED = 2_000_000
"""Number of sample values of all runs, 5 bytes each, above which the page has no paired differences."""


def list_samples(
    finished: Mapping[Path, Results], samples: Mapping[Path, RunSamples], pool: Pool
) -> dict[Path, dict[str, object]]:
    """Return the samples to show of every run, by folder.

    Each entry has `kind`, `index` and, in that order, lists of these samples: `prompt`, `answer` and `text` (indices
    into the pool; the last two for texts), `reading` (`pack_reading`, for texts with forced tokens) and `values` (by
    metric). Paired differences use all samples: `drawn` is the pool's index of their prompts and seeds, `columns` has
    their values by metric (little-endian float32 in base64, NaN if missing) if the metric is the mean of its samples or
    of the means of its groups, and `strata` has the pool's indices of these groups.
    """
    share = max(MIN_SAMPLES, min(MAX_SAMPLES, MAX_ALTOGETHER // max(1, len(finished))))
    chosen = {}
    for folder, run in finished.items():
        count = share if samples[folder].kind == IMAGES.kind else min(share, MAX_TEXTS)
        chosen[folder] = _choose(samples[folder], run, count)
    for folder, run in finished.items():
        reference = folder.parent / (run.reference or run.run)
        if reference in chosen:
            chosen[reference] = chosen[reference] | chosen[folder]
    counts = (np.isfinite(column).sum() for each in samples.values() for column in each.values.values())
    paired = sum(map(int, counts)) <= MAX_PAIRED
    prompts = _Prompts(pool)
    return {
        folder: {
            **_describe(finished[folder].n, sorted(indices), samples[folder], prompts, pool),
            **(_pack_columns(finished[folder], samples[folder], pool) if paired else {"columns": {}}),
        }
        for folder, indices in chosen.items()
    }


class _Prompts:
    """Pool indices of prompts, and of lists of prompts and seeds, computed once for each list."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._prompts: dict[int, list[int]] = {}
        self._lists: dict[tuple[int, int], int] = {}

    def list_indices(self, drawn: Drawn) -> list[int]:
        """Return the pool index of every prompt."""
        if id(drawn) not in self._prompts:
            self._prompts[id(drawn)] = [self._pool.add(prompt) for prompt, _ in drawn]
        return self._prompts[id(drawn)]

    def find_list(self, drawn: Drawn, count: int) -> int:
        """Return the pool index of the list of (prompt's index, seed) of the first `count` samples."""
        if (id(drawn), count) not in self._lists:
            padded = [*drawn[:count], *[(None, None)] * (count - len(drawn))]
            pairs = [(self._pool.add(prompt), seed) for prompt, seed in padded]
            self._lists[id(drawn), count] = self._pool.add(pairs)
        return self._lists[id(drawn), count]


def _pack_columns(run: Results, samples: RunSamples, pool: Pool) -> dict[str, object]:
    packed, strata = {}, {}
    for name, column in samples.values.items():
        groups = samples.strata.get(name)
        metric = find_metric(run, name)
        value = metric.value if metric else None
        mean = _average(column, groups)
        if value is not None and math.isclose(mean, value, rel_tol=1e-6, abs_tol=1e-9):
            padded = np.full(run.n, np.nan, "<f4")
            padded[: len(column)] = column[: run.n]
            packed[name] = base64.b64encode(padded.tobytes()).decode()
            if groups is not None:
                strata[name] = pool.add(groups)
    return {"columns": packed, **({"strata": strata} if strata else {})}


def _average(column: np.ndarray, groups: list[str | None] | None) -> float:
    """Return the mean of a column's finite values, or the mean over groups of their means."""
    known = np.flatnonzero(np.isfinite(column))
    if groups is None:
        return math.fsum(column[known]) / len(known)
    members: dict[str | None, list[float]] = {}
    for index in known:
        members.setdefault(groups[index], []).append(float(column[index]))
    return math.fsum(math.fsum(values) / len(values) for values in members.values()) / len(members)


def _choose(samples: RunSamples, run: Results, count: int) -> set[int]:
    """Return the samples that are among the `count` worst by some metric."""
    worst: set[int] = set()
    for name, column in samples.values.items():
        sign = 1 if run.metrics[name].better == "higher" else -1
        known = np.flatnonzero(np.isfinite(column))
        worst.update(known[np.argsort(sign * column[known], kind="stable")[:count]].tolist())
    return worst


def _describe(
    count: int, indices: list[int], samples: RunSamples, prompts: _Prompts, pool: Pool
) -> dict[str, object]:
    shared, nothing = prompts.list_indices(samples.drawn), None
    entry: dict[str, object] = {
        "kind": samples.kind,
        "index": indices,
        "drawn": prompts.find_list(samples.drawn, count),
        "prompt": [shared[index] if index < len(shared) else pool.add(nothing) for index in indices],
        "values": {name: _shorten(column, indices) for name, column in samples.values.items()},
    }
    if entry["kind"] == TEXTS.kind:
        entry["text"] = [pool.add(_read_text(samples.samples, index)) for index in indices]
        entry["answer"] = [pool.add(samples.answers.get(index)) for index in indices]
    if entry["kind"] == READINGS.kind:
        prompt = dict(enumerate(text for text, _ in samples.drawn))
        entry["reading"] = [
            pack_reading(samples.samples / name_sample(index, READINGS.suffix), prompt.get(index), pool)
            for index in indices
        ]
    return entry


def _shorten(column: np.ndarray, indices: list[int]) -> list[float | None]:
    """Return values with six significant digits; None where there is none."""
    padded = np.full(max(indices, default=-1) + 1, np.nan)
    padded[: len(column)] = column[: len(padded)]
    return [*map(shorten, padded[indices].tolist())]


def _read_text(samples: Path, index: int) -> str | None:
    try:
        text = read_text(samples / name_sample(index, TEXTS.suffix), errors="replace")
    except OSError:
        return None
    if len(text) <= MAX_LETTERS:
        return text
    left_out = len(text) - MAX_LETTERS
    return (
        f"{text[: MAX_LETTERS // 2]}\n[{left_out} characters are left out here]\n{text[-MAX_LETTERS // 2 :]}"
    )
