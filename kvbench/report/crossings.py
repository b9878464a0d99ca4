"""Means over runs that differ in seeds, kept with the runs, as they are made of the values of all samples."""

from collections.abc import Hashable, Sequence
from dataclasses import asdict
from pathlib import Path

from kvbench.core.files import hash_files
from kvbench.core.kept import KeptValues
from kvbench.eval.protocol import compare, crossed, intervals, ranges, scores
from kvbench.eval.protocol.compare import RECORDS
from kvbench.eval.protocol.crossed import Crossed, cross_runs
from kvbench.eval.protocol.records import read_fields

KEPT = ".seeds.kept"
"""File under `runs_dir`."""
MAKERS = (compare, crossed, intervals, ranges, scores)
"""Modules whose code decides what is kept."""


class Crossings:
    """Means over runs below a folder, kept in one file of it; `save` writes them."""

    def __init__(self, runs_dir: Path) -> None:
        self._runs_dir = runs_dir
        version = hash_files(Path(str(module.__file__)) for module in MAKERS)
        self._kept = KeptValues(runs_dir / KEPT, version)

    def cross(self, folders: Sequence[Path], choices: Sequence[Sequence[Hashable]]) -> dict[str, Crossed]:
        """Return the result of `cross_runs`, known if no record of the runs changed since.

        Raises:
            Exception: as `cross_runs`, whose failures are not kept.
        """
        names = [folder.relative_to(self._runs_dir).as_posix() for folder in folders]
        files = [folder / RECORDS for folder in folders]
        files += [path for folder in folders for path in sorted((folder / "metrics").glob("*.json*"))]
        name = " ".join(f"{name} {choice}" for name, choice in zip(names, choices, strict=True))
        values = self._kept.get(name, files, lambda: _cross(folders, choices))
        return {metric: read_fields(Crossed, value) for metric, value in values.items()}

    def save(self) -> None:
        """Write what is known: of runs that still exist, also what was not asked for."""
        self._kept.save(lambda name: (self._runs_dir / name.partition(" ")[0]).is_dir())


def _cross(folders: Sequence[Path], choices: Sequence[Sequence[Hashable]]) -> dict[str, object]:
    return {name: asdict(one) for name, one in cross_runs(folders, choices=choices).items()}
