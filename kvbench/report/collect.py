"""Selection of the runs of a table: finished runs, their references, and the bounds of those."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from kvbench.runs.record.results import FILE, Results, read_results


def collect_runs(runs_dir: Path) -> list[Results]:
    """Read the results of every finished run under `runs_dir`.

    Raises:
        ConfigError: one of them is damaged.
    """
    return read_runs(path.parent for path in sorted(runs_dir.glob(f"*/*/{FILE}")))


def read_runs(folders: Iterable[Path]) -> list[Results]:
    """Read the results of some run folders, each once; those that are not finished are left out."""
    found = (read_results(folder) for folder in dict.fromkeys(folders))
    return [run for run in found if run is not None]


def read_with_references(folders: Sequence[Path]) -> list[Results]:
    """Read the results of some run folders and of the references they were compared with."""
    references = [folder.parent / (run.reference or run.run) for folder, run in _read_each(folders)]
    return read_runs([*folders, *references])


def read_with_bounds(folders: Sequence[Path]) -> list[Results]:
    """Read the results of some run folders, and of the bounds of their references where `task=bounds` made them."""
    references = {(folder.parent, run.reference or run.run) for folder, run in _read_each(folders)}
    bounds = [
        folder
        for parent in sorted({parent for parent, _ in references})
        for folder, run in _read_each(sorted(parent.glob("full-*")))
        if (parent, run.reference) in references
    ]
    return read_runs([*folders, *bounds])


def _read_each(folders: Iterable[Path]) -> list[tuple[Path, Results]]:
    return [(folder, run) for folder in folders for run in read_runs([folder])]
