"""Published datasets, whose runs the page shows too, read from untrusted folders."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.core.config import ConfigError
from kvbench.core.links import find_leaving_link
from kvbench.dashboard.folders import Damaged
from kvbench.data.frames import read_table
from kvbench.data.names import make_printable, make_writable
from kvbench.data.publication import FILE_LIST, SAMPLES_FILE, hash_publication, join_names, list_changes
from kvbench.data.verification import Checked, list_verifications, read_verdicts
from kvbench.eval.files.kinds import IMAGES, list_kinds
from kvbench.eval.files.prompt_lines import MAX_DEPTH
from kvbench.runs.record.results import FILE, Results
from kvbench.runs.record.samples import read_finished

RUNS, TABLES = "runs", SAMPLES_FILE.parts[0]

Rows = Mapping[int, Mapping[str, Any]]
"""Values by column for each sample index."""


@dataclass(frozen=True)
class AddedRun:
    """A run of a dataset.

    Attributes:
        results: its results.
        dataset: name of the dataset's folder.
        kind: kind of its samples.
        samples: folder of their files.
        rows: values of samples.parquet by sample index; empty without this file.
        checked: verdict of `kvbench verify` on exactly these files; None if there is none.
    """

    results: Results
    dataset: str
    kind: str
    samples: Path
    rows: Rows
    checked: Checked | None


@dataclass(frozen=True)
class LoadedDatasets:
    """Runs of datasets by folder, and the folders that could not be read as datasets."""

    entries: Mapping[Path, AddedRun]
    left_out: tuple[Damaged, ...] = ()


NO_DATASETS = LoadedDatasets({})


def find_datasets(patterns: Iterable[str]) -> LoadedDatasets:
    """Read the datasets that paths and patterns such as `published/*` name, each once, in the order of their paths.

    A folder that is not a dataset, or is damaged, is left out with its reason.

    Raises:
        ConfigError: a pattern names no folder.
    """
    folders: dict[Path, Path] = {}
    for pattern in patterns:
        folders = {folder.resolve(): folder for folder in list_folders(pattern)} | folders
    entries: dict[Path, AddedRun] = {}
    left_out = []
    for folder in sorted(folders.values()):
        try:
            entries |= read_dataset(folder)
        except (ConfigError, OSError, ValueError, RecursionError) as error:
            reason = " ".join(str(error).split()).removeprefix(f"{folder}/")
            left_out.append(Damaged(*(make_printable(make_writable(text)) for text in (str(folder), reason))))
    return LoadedDatasets(entries, tuple(left_out))


def list_folders(pattern: str) -> list[Path]:
    """Return the folders that a path or a pattern names.

    Raises:
        ConfigError: no folder matches.
    """
    path = Path(pattern).expanduser()
    root = Path(path.anchor)
    try:
        paths = [path] if path.is_dir() else sorted(root.glob(str(path.relative_to(root))))
    except ValueError:  # not a pattern, such as a**
        paths = []
    folders = [each for each in paths if each.is_dir()]
    if not folders:
        raise ConfigError(
            f"runs_dirs={pattern}: names no folder; name published datasets, such as 'runs_dirs=[published/*]'"
        )
    return folders


def read_dataset(folder: Path) -> dict[Path, AddedRun]:
    """Check a dataset's tables and runs against its list of files, and return its runs by folder.

    Raises:
        ConfigError: it is not a dataset, was changed after publication, or has a link to a file outside.
        OSError, ValueError: a file cannot be read.
    """
    if not (folder / FILE_LIST).is_file() or not (folder / RUNS).is_dir():
        raise ConfigError(f"is not a published dataset: it lacks {FILE_LIST} or {RUNS}/; see kvbench publish")
    if (link := find_leaving_link(folder)) is not None:
        raise ConfigError(
            f"{link.relative_to(folder)} is a link that leaves the folder; copy the dataset again"
        )
    if changed := list_changes(folder, (RUNS, TABLES)):
        names = join_names([change.name for change in changed])
        raise ConfigError(f"not as in {FILE_LIST}: {names}; copy the dataset again")
    runs = {path.parent: _read_run(path.parent) for path in sorted((folder / RUNS).glob(f"*/*/{FILE}"))}
    if not runs:
        raise ConfigError("holds no run; copy the dataset again")
    for run_folder, run in runs.items():
        if run.reference is not None and run_folder.parent / run.reference not in runs:
            raise ConfigError(f"lacks {run.reference}, the reference of {_name(run_folder)}; copy it again")
    tables = _read_tables(folder / SAMPLES_FILE, sum(run.n for run in runs.values()))
    documents = list_verifications(folder)
    verdicts = read_verdicts(documents, hash_publication(folder)) if documents else {}
    return {
        run_folder: AddedRun(
            run,
            folder.absolute().name,
            kind := _find_kind(folder, _name(run_folder)),
            folder / kind / _name(run_folder),
            tables.get(_name(run_folder), {}),
            verdicts.get(_name(run_folder)),
        )
        for run_folder, run in runs.items()
    }


def _name(folder: Path) -> str:
    """Return a run's path below `runs/` and below each other folder of its dataset."""
    return f"{folder.parent.name}/{folder.name}"


def _find_kind(dataset: Path, name: str) -> str:
    return next((kind for kind in list_kinds() if (dataset / kind / name).is_dir()), IMAGES.kind)


def _read_run(folder: Path) -> Results:
    """Read a run's results.

    Raises:
        ConfigError: they are damaged, belong to another run, or are nested deeper than `MAX_DEPTH`.
    """
    results = read_finished(folder)
    assert results is not None  # the caller has found the file
    if results.run != folder.name:
        raise ConfigError(f"{_name(folder)}: {FILE} names {results.run}; copy it again")
    if make_writable(str(folder)) != str(folder):
        raise ConfigError(f"{_name(folder)}: name is not UTF-8; rename it")
    settings = [evaluator.settings for evaluator in results.evaluated.values()]
    if _is_deeper([results.config, results.provenance, settings], MAX_DEPTH):
        raise ConfigError(f"{_name(folder)}: {FILE} has more than {MAX_DEPTH} levels; leave it out")
    return results


def _is_deeper(value: object, levels: int) -> bool:
    """Return whether a value is nested deeper than `levels`."""
    inner = list(value.values()) if isinstance(value, Mapping) else value
    if not isinstance(inner, list | tuple):
        return False
    return levels == 0 or any(_is_deeper(item, levels - 1) for item in inner)


def _read_tables(path: Path, samples: int) -> dict[str, Rows]:
    """Return the rows of samples.parquet by run and sample index; `samples` is the number of samples of all runs.

    Raises:
        ConfigError: polars is not installed, or the file is damaged or has more rows than samples.
    """
    if not path.is_file():
        return {}
    tables: dict[str, dict[int, Mapping[str, Any]]] = {}
    try:
        for row in read_table(path, samples).to_dicts():
            tables.setdefault(row["folder"], {})[int(row["index"])] = row
    except ConfigError:
        raise
    except Exception as error:  # a damaged table may raise anything; other datasets are shown
        reason = f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
        raise ConfigError(f"{path.name}: cannot be read ({reason}); copy it again") from None
    return dict(tables)


def relate(path: Path, root: Path) -> str:
    """Return a path relative to the folder `root`, with slashes."""
    return Path(os.path.relpath(path, root)).as_posix()
