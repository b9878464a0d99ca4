"""Divergence from the full cache over positions in forced-decoding runs, computed once, and the table of its tail."""

from collections.abc import Sequence
from pathlib import Path

from kvbench.core.files import hash_path
from kvbench.core.kept import FileCache
from kvbench.eval.files.kinds import READINGS, find_stored_kind
from kvbench.eval.files.samples import Sample, read_samples
from kvbench.eval.text import drift as code
from kvbench.eval.text.drift import TAIL, Band, DivergenceCurve, WorstPosition, find_worst, trace_drift
from kvbench.forced.record import ScoredText
from kvbench.report.conditions import group_conditions, is_full
from kvbench.report.runs_table import identifying_columns, name_methods, order_runs
from kvbench.report.seeds import list_members, name_count
from kvbench.report.tables import Row, format_number
from kvbench.runs.record.folder import RECORDS
from kvbench.runs.record.results import Results

KEPT = ".drift.kept"
"""Cache file under `runs_dir` with the divergence of all forced-decoding runs."""
DIGITS = 4
"""Decimals of KL, in nats, in the table of the tail."""


class Drifts:
    """Divergence over positions of the runs below a folder, kept in one file of it."""

    def __init__(self, runs_dir: Path) -> None:
        version = hash_path(Path(__file__)) + hash_path(Path(code.__file__))
        self._runs_dir, self._kept = runs_dir, FileCache(runs_dir / KEPT, version)

    def read(self, run: Results) -> DivergenceCurve | None:
        """Return the divergence of a run, over all texts of its members if it joins seeds.

        None for the full cache, for runs without forced decoding, and if a file is missing or damaged.
        """
        folders = [self._runs_dir / member.model / member.run for member in list_members(run)]
        if is_full(run) or any(find_stored_kind(folder) is not READINGS for folder in folders):
            return None
        name = " ".join(folder.relative_to(self._runs_dir).as_posix() for folder in folders)
        entry = self._kept.get(name, [folder / RECORDS for folder in folders], lambda: _trace(folders))
        if entry is None:
            return None
        unit, edges, *values, tail = entry
        kl, same = (tuple(Band(*band) for band in bands) for bands in values)
        return DivergenceCurve(unit, tuple(edges), kl, same, tail)

    def save(self) -> None:
        """Write what was computed to the cache file, for the next command."""
        self._kept.save()


def _trace(folders: Sequence[Path]) -> DivergenceCurve | None:
    try:
        pairs = [pair for folder in folders for pair in _read_all(folder)]
    except (OSError, ValueError):
        return None
    return trace_drift([reading for _, reading in pairs], [sample.cluster for sample, _ in pairs])


def _read_all(folder: Path) -> list[tuple[Sample, ScoredText]]:
    """Return the scored texts of a run by index, without comparing hashes with the records, which scoring does."""
    samples = read_samples(folder / RECORDS)
    return [(samples[index], ScoredText.read(READINGS.find(folder, index))) for index in sorted(samples)]


def find_worst_positions(folder: Path, count: int) -> list[WorstPosition]:
    """Return the `count` scored tokens with the largest KL above 0; none for runs without forced decoding.

    Raises:
        ValueError: a file is missing or damaged.
    """
    if find_stored_kind(folder) is not READINGS:
        return []
    texts = ((sample.index, sample.prompt, reading) for sample, reading in _read_all(folder))
    return [position for position in find_worst(texts, count) if position.kl > 0]


def read_drifts(runs_dir: Path, runs: Sequence[Results]) -> list[tuple[Results, DivergenceCurve]]:
    """Return forced-decoding runs under a method with their divergence, in the order of `order_runs`."""
    drifts = Drifts(runs_dir)
    pairs = [(run, drift) for run in order_runs(runs) if (drift := drifts.read(run)) is not None]
    drifts.save()
    return pairs


def group_drifts(runs_dir: Path, runs: Sequence[Results]) -> dict[str, dict[str, dict[str, DivergenceCurve]]]:
    """Return the divergence of runs by budget and method, for each name of `group_conditions`."""
    pairs = read_drifts(runs_dir, runs)
    drifts = {id(run): drift for run, drift in pairs}
    groups: dict[str, dict[str, dict[str, DivergenceCurve]]] = {}
    for where, members in group_conditions([run for run, _ in pairs]).items():
        for run, name in zip(members, name_methods(members), strict=True):
            groups.setdefault(where, {}).setdefault(run.budget_text, {})[name] = drifts[id(run)]
    return groups


def make_tail_rows(pairs: Sequence[tuple[Results, DivergenceCurve]]) -> list[Row]:
    """Return a row for each run with the quantiles of KL over the scored tokens of all texts, in nats."""
    return [
        {**cells, "n": name_count(run)}
        | {f"kl {name}": format_number(drift.tail[name], DIGITS) for name in TAIL}
        for cells, (run, drift) in zip(identifying_columns([run for run, _ in pairs]), pairs, strict=True)
    ]
