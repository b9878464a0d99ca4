"""Recorded runs in a folder: one run, a folder of runs, or a published dataset, which is staged as a folder of runs."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from kvbench.core.config import ConfigError
from kvbench.core.links import find_leaving_link
from kvbench.data.names import make_printable
from kvbench.data.publication import RUNS_FILE
from kvbench.eval.files.kinds import list_kinds
from kvbench.runs.record.folder import RECORDS
from kvbench.runs.record.results import FILE, read_results

PUBLISHED = "runs"
"""Folder of a published dataset that holds the description of each run."""


class Recorded(NamedTuple):
    """A run to verify.

    Attributes:
        name: `<model>/<name of the run's folder>`.
        folder: folder with the layout of a run.
        dataset: the published dataset that contains it; None for other runs.
    """

    name: str
    folder: Path
    dataset: Path | None = None


def find_recorded(folder: Path, stage: Path) -> list[Recorded]:
    """Return the runs in a folder with the references that they were compared with, each once.

    Args:
        folder: a run, a folder of runs or of a model's runs, or a published dataset.
        stage: empty folder for the layout of published runs.

    Raises:
        ConfigError: there is no run, or a symbolic link leaves the folder.
    """
    if not folder.is_dir():
        raise ConfigError(f"verify: {folder}: no such folder")
    if (link := find_leaving_link(folder)) is not None:
        raise ConfigError(
            f"verify: {make_printable(str(link))} is a symbolic link that leaves its folder; copy what it names"
        )
    dataset = folder if (folder / RUNS_FILE).is_file() and (folder / PUBLISHED).is_dir() else None
    root = folder if dataset is None else _stage_published(dataset, stage)
    paths = list(dict.fromkeys(_with_references(_find_runs(root))))
    if not paths:
        raise ConfigError(f"verify: {folder}: holds no run; name a run, a folder of runs or a dataset")
    return [Recorded(f"{path.parent.name}/{path.name}", path, dataset) for path in paths]


def _find_runs(root: Path) -> Iterator[Path]:
    """Yield the folders with results or records: `root`, or folders one or two levels below."""
    for pattern in ("", "*/", "*/*/"):
        found = {path.parent.absolute() for name in (FILE, RECORDS) for path in root.glob(pattern + name)}
        yield from sorted(found)


def _with_references(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        yield path
        try:
            results = read_results(path)
        except ConfigError:  # found again when the run is verified
            continue
        if results is not None and results.reference is not None:
            yield path.parent / results.reference


def _stage_published(dataset: Path, stage: Path) -> Path:
    """Link the files of a dataset's runs into folders with the layout of runs; return their root."""
    for described in sorted(path for path in (dataset / PUBLISHED).glob("*/*") if path.is_dir()):
        path = described.relative_to(dataset / PUBLISHED)
        target = stage / path
        target.mkdir(parents=True)
        for file in described.iterdir():
            (target / file.name).symlink_to(file.absolute())
        for kind in list_kinds():
            if (samples := dataset / kind / path).is_dir():
                (target / kind).symlink_to(samples.absolute())
    return stage
