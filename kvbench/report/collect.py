"""Results of finished runs, with their references and the bounds of these references."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from kvbench.runs.record.results import FILE, Results, read_results


def collect_runs(runs_dir: Path) -> list[Results]:
    """Read the results of every finished run under `runs_dir`.

    Raises:
        ConfigError: the results of a run are damaged.
    """
    return read_runs(path.parent for path in sorted(runs_dir.glob(f"*/*/{FILE}")))


def read_runs(folders: Iterable[Path]) -> list[Results]:
    """Read the results of run folders, each once; unfinished runs are left out."""
    return [run for _, run in _read_pairs(dict.fromkeys(folders))]


def read_with_references(folders: Sequence[Path]) -> list[Results]:
    """Read the results of run folders and of their references."""
    references = [folder.parent / (run.reference or run.run) for folder, run in _read_pairs(folders)]
    return read_runs([*folders, *references])


def read_with_bounds(folders: Sequence[Path]) -> list[Results]:
    """Read the results of run folders, and of the bounds of their references (`task=bounds`)."""
    references = {(folder.parent, run.reference or run.run) for folder, run in _read_pairs(folders)}
    bounds = [
        folder
        for parent in sorted({parent for parent, _ in references})
        for folder, run in _read_pairs(sorted(parent.glob("full-*")))
        if (parent, run.reference) in references
    ]
    return read_runs([*folders, *bounds])


def _read_pairs(folders: Iterable[Path]) -> list[tuple[Path, Results]]:
    return [(folder, run) for folder in folders if (run := read_results(folder)) is not None]
