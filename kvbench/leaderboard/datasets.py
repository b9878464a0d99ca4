"""Published datasets: their runs, authors and hashes, read from folders that other people made."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvbench.core.config import ConfigError
from kvbench.core.files import hash_path, hash_values, read_text
from kvbench.core.names import clean_name, make_printable, make_writable
from kvbench.core.plain_yaml import parse_yaml
from kvbench.data.bounded import read_table
from kvbench.eval.files.prompt_lines import MAX_DEPTH
from kvbench.eval.files.samples import Sample, read_samples
from kvbench.report.dataset import CARD, PAGE, SAMPLES_FILE
from kvbench.report.publication import FILE_LIST, join_names, list_changed
from kvbench.runs.record.folder import RECORDS
from kvbench.runs.record.results import FILE, Results
from kvbench.runs.record.samples import read_finished

RUNS, TABLES = "runs", SAMPLES_FILE.parts[0]

Rows = Mapping[int, Mapping[str, Any]]
"""Values by column for each sample index."""


@dataclass(frozen=True)
class Entry:
    """A run of a dataset.

    Attributes:
        path: model and name of the run's folder.
        results: its results.
        drawn: SHA-256 of the indices, prompts and seeds of its samples.
        samples: SHA-256 of the same and of the samples' hashes.
        rows: values per sample from samples.parquet; empty without this file.
    """

    path: str
    results: Results
    drawn: str
    samples: str
    rows: Rows


@dataclass(frozen=True)
class Dataset:
    """A published dataset.

    Attributes:
        folder: its folder, as it was named.
        author: who published it, from its card; None if the card does not say.
        files_sha256: SHA-256 of SHA256SUMS, which tells equal copies of the dataset.
        entries: its runs by path.
    """

    folder: Path
    author: str | None
    files_sha256: str
    entries: Mapping[str, Entry]

    def find_reference(self, entry: Entry) -> Entry | None:
        """Return the run of the full cache that a run was compared with."""
        return self.entries.get(f"{entry.path.partition('/')[0]}/{entry.results.reference}")


@dataclass(frozen=True)
class Found:
    """Datasets, and a line for each folder that could not be read as one."""

    datasets: tuple[Dataset, ...]
    left_out: tuple[str, ...]


def find_datasets(patterns: Iterable[str]) -> Found:
    """Read the datasets that paths and patterns such as `published/*` name, each once, in the order of their paths.

    A folder that is no dataset, or a damaged one, becomes a line.

    Raises:
        ConfigError: a pattern names no folder, or packages are missing.
    """
    folders: dict[Path, Path] = {}
    for pattern in patterns:
        named = list_folders(pattern)
        folders |= {folder.resolve(): folder for folder in named if folder.resolve() not in folders}
    datasets, left_out = [], []
    for folder in sorted(folders.values()):
        try:
            datasets.append(read_dataset(folder))
        except (ConfigError, OSError, ValueError, RecursionError) as error:
            said = " ".join(str(error).split())
            line = said if said.startswith(str(folder)) else f"{folder}: {said}"
            left_out.append(make_printable(make_writable(line)))
    return Found(tuple(datasets), tuple(left_out))


def list_folders(pattern: str) -> list[Path]:
    """Return the folders that a path or a pattern names.

    Raises:
        ConfigError: there is none.
    """
    path = Path(pattern).expanduser()
    root = Path(path.anchor)
    try:
        found = [path] if path.is_dir() else sorted(root.glob(str(path.relative_to(root))))
    except ValueError:  # no pattern, such as a**
        found = []
    folders = [one for one in found if one.is_dir()]
    if not folders:
        raise ConfigError(
            f"runs_dirs={pattern}: names no folder; name published datasets, such as 'runs_dirs=[published/*]'"
        )
    return folders


def read_dataset(folder: Path) -> Dataset:
    """Read a dataset after a comparison of the files that are read with its list.

    Raises:
        ConfigError: it is no dataset, or is not as it was published.
        OSError, ValueError: a file cannot be read.
    """
    if not (folder / FILE_LIST).is_file() or not (folder / RUNS).is_dir():
        raise ConfigError(
            f"{folder}: is no published dataset, which has {FILE_LIST} and {RUNS}/; make one with kvbench publish"
        )
    if changed := list_changed(folder, (CARD, PAGE, RUNS, TABLES)):
        shown = join_names(changed)
        raise ConfigError(f"{folder}: not as in {FILE_LIST}: {shown}; copy the dataset again")
    paths = sorted(path.parent for path in (folder / RUNS).glob(f"*/*/{FILE}"))
    records = {path: read_samples(path / RECORDS) for path in paths}
    entries = [_read_entry(path, samples) for path, samples in records.items()]
    if not entries:
        raise ConfigError(f"{folder}: holds no run")
    dataset = Dataset(
        folder, _read_author(folder / CARD), hash_path(folder / FILE_LIST), {one.path: one for one in entries}
    )
    for entry in entries:
        if entry.results.reference is not None and dataset.find_reference(entry) is None:
            raise ConfigError(f"{folder}: lacks {entry.results.reference}, the reference of {entry.path}")
    tables = _read_tables(folder / SAMPLES_FILE, sum(map(len, records.values())))
    return replace(
        dataset, entries={one.path: replace(one, rows=tables.get(one.path, {})) for one in entries}
    )


def _read_entry(folder: Path, samples: Mapping[int, Sample]) -> Entry:
    """Read a run, whose list of samples is given, without rows.

    Raises:
        ConfigError: its results are damaged, or are another run's.
    """
    results, path = read_finished(folder), f"{folder.parent.name}/{folder.name}"
    assert results is not None  # the caller has found the file
    if results.run != folder.name:
        raise ConfigError(f"{folder}: {FILE} is of {results.run}")
    settings = [one.settings for one in results.evaluated.values()]
    if _is_deeper([results.config, results.provenance, settings], MAX_DEPTH):
        raise ConfigError(f"{folder}: {FILE} has more than {MAX_DEPTH} levels of nested lists and objects")
    drawn = [(index, one.seed, one.prompt) for index, one in sorted(samples.items())]
    contents = [one.sha256 for _, one in sorted(samples.items())]
    return Entry(path, results, hash_values(drawn), hash_values([drawn, contents]), {})


def _is_deeper(value: object, levels: int) -> bool:
    """Return whether lists and objects are nested in more levels."""
    inner = list(value.values()) if isinstance(value, Mapping) else value
    if not isinstance(inner, list | tuple):
        return False
    return levels == 0 or any(_is_deeper(one, levels - 1) for one in inner)


def _read_author(card: Path) -> str | None:
    """Return the author in a card's metadata; None if it is missing or no name.

    Raises:
        ConfigError: the metadata are damaged.
        OSError, ValueError: the card cannot be read.
    """
    text = read_text(card) if card.is_file() else ""
    try:
        values = parse_yaml(text.split("---\n")[1]) if text.startswith("---\n") else None
    except ValueError as error:
        raise ConfigError(f"{card}: its metadata cannot be read ({error})") from None
    author = values.get("author") if isinstance(values, dict) else None
    return clean_name(" ".join(author.split())) if isinstance(author, str) else None


def _read_tables(path: Path, samples: int) -> dict[str, Rows]:
    """Return the rows of samples.parquet by run and index; `samples` is the number of samples of all runs.

    Raises:
        ConfigError: polars is not installed, or the file is damaged or has more rows than samples.
    """
    if not path.is_file():
        return {}
    try:
        tables: dict[str, dict[int, Mapping[str, Any]]] = {}
        for row in read_table(path, samples).to_dicts():
            tables.setdefault(row["folder"], {})[int(row["index"])] = row
    except ConfigError:
        raise
    except Exception as error:  # a damaged table may raise anything; other datasets are shown
        said = " ".join(str(error).split())
        raise ConfigError(f"{path}: cannot be read ({type(error).__name__}: {said:.200})") from None
    return dict(tables)
