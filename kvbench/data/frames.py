"""Finished runs and their samples as polars frames (docs/data.md), and untrusted tables, parsed with limits."""

import importlib
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from kvbench.core.config import ConfigError
from kvbench.core.files import check_file, find_obstacle, hash_content, hash_path, write_whole
from kvbench.core.kept import FileCache
from kvbench.data import flatten
from kvbench.data.flatten import (
    FIXED,
    SAMPLE,
    ColumnTypes,
    FlatRow,
    Value,
    find_kinds,
    flatten_run,
    order_columns,
)
from kvbench.runs.record.earlier import EarlierRun, is_earlier
from kvbench.runs.record.folder import read_records
from kvbench.runs.record.results import FILE, Results, read_results
from kvbench.runs.record.samples import read_finished, read_values

if TYPE_CHECKING:
    import polars as pl

KEPT = ".rows.kept"
"""Cache file under `runs_dir` with the rows of all runs, which may be deleted at any time."""
MOST_BYTES = 2**30
"""Maximum bytes of text in an untrusted table."""


class TooLargeError(ConfigError):
    """A table has more rows than its records, too many bytes of strings, or columns of other types."""


def import_polars() -> ModuleType:
    """Return polars, an optional dependency.

    Raises:
        ConfigError: polars is not installed.
    """
    try:
        return importlib.import_module("polars")
    except ImportError:
        raise ConfigError('polars is missing; install it with pip install "kvbench[data]"') from None


def runs_df(runs_dir: Path | str = "runs") -> "pl.DataFrame":
    """Return a row for each finished run under a folder: identity, memory, time, and metrics with intervals.

    Rows are cached in the file of `locate_kept`.

    Raises:
        ConfigError: there is no such folder, a run's results are damaged, or polars is missing.
    """
    import_polars()
    return _make_frame(load_rows(_check_folder(runs_dir)), FIXED)


def load_rows(runs_dir: Path) -> list[FlatRow]:
    """Return a row for each finished run under a folder, sorted by folder; runs of an earlier version are left out.

    Raises:
        ConfigError: a results.json is damaged.
    """
    kept = FileCache(locate_kept(runs_dir), hash_path(Path(flatten.__file__)))
    names = sorted(path.parent.relative_to(runs_dir).as_posix() for path in runs_dir.glob(f"*/*/{FILE}"))
    rows = [kept.get(name, [runs_dir / name / FILE], partial(_read_row, runs_dir, name)) for name in names]
    kept.save()
    return [row for row in rows if row is not None]


def _read_row(runs_dir: Path, folder: str) -> FlatRow | None:
    """Return the row of a run; None if it was deleted meanwhile, or is of an earlier version."""
    try:
        run = read_results(runs_dir / folder)
    except EarlierRun:
        return None
    return None if run is None else {"folder": folder, **flatten_run(run)}


def locate_kept(runs_dir: Path) -> Path:
    """Return the path of the cached rows: in `runs_dir`, or in the user's cache folder if that is not writable."""
    if find_obstacle(runs_dir) is None:
        return runs_dir / KEPT
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvbench"
    return caches / f"rows-{hash_content(str(runs_dir.absolute()))[:16]}.kept"


def frame_runs(runs: Mapping[str, Results]) -> "pl.DataFrame":
    """Return the frame of `runs_df` for runs by folder.

    Raises:
        ConfigError: polars is missing.
    """
    return _make_frame([{"folder": folder, **flatten_run(run)} for folder, run in runs.items()], FIXED)


def samples_df(source: Path | str | Iterable[Path | str] = "runs") -> "pl.DataFrame":
    """Return a row for each sample of finished runs: prompt, cost and metrics.

    `source` is a folder of runs, or the folders of single runs. Nothing is cached.

    Raises:
        ConfigError: there is no such folder, a run is not finished, its files are damaged, or polars is missing.
    """
    if isinstance(source, Path | str):
        root = _check_folder(source)
        every = (path.parent for path in sorted(root.glob(f"*/*/{FILE}")))
        folders = [folder for folder in every if not is_earlier(folder)]
    else:
        folders = [Path(folder) for folder in source]
    return _make_frame([row for folder in folders for row in list_samples(folder)], SAMPLE)


def list_samples(folder: Path) -> list[FlatRow]:
    """Return a row for each sample of a finished run: the columns of `SAMPLE` and the values of evaluators.

    Raises:
        ConfigError: the run is not finished, or one of its files is damaged.
    """
    results = read_finished(folder)
    if results is None:
        raise ConfigError(f"{folder}: has no {FILE}; finish the run first")
    path = f"{folder.absolute().parent.name}/{folder.absolute().name}"
    rows: dict[int, dict[str, Value]] = {}
    for index, line in read_records(folder).items():
        cells = {name: line.get(name) for name in SAMPLE if name != "folder"}
        plain = {key: cell if isinstance(cell, str | int | float) else None for key, cell in cells.items()}
        rows[index] = {"folder": path, **plain}
    for index, line in read_values(folder, results):
        values = {
            name: value for name, value in line.items() if value is None or isinstance(value, int | float)
        }
        rows[index] = {**values, **rows[index]}
    return list(rows.values())


def _make_frame(rows: Sequence[FlatRow], fixed: ColumnTypes) -> "pl.DataFrame":
    """Return rows as a frame of the fixed columns and of all other columns with a value."""
    polars = import_polars()
    types = {"bool": polars.Boolean, "int": polars.Int64, "float": polars.Float64, "text": polars.String}
    kinds = {**find_kinds(rows), **fixed}
    schema = {name: types[kinds[name]] for name in order_columns(kinds, fixed)}
    if not rows:
        return polars.DataFrame(schema=schema)
    return polars.read_ndjson("\n".join(map(json.dumps, rows)).encode(), schema=schema)


def _check_folder(path: Path | str) -> Path:
    root = Path(path).expanduser()
    if not root.is_dir():
        raise ConfigError(f"runs_dir={path}: no such folder")
    return root


def export_frames(runs_dir: Path, form: str, output: Path | None = None) -> list[Path]:
    """Write `runs.<form>` and `samples.<form>` of a folder of runs, each whole or not at all; return their paths.

    Raises:
        ConfigError: the folder holds no finished runs, a run is damaged, or polars is missing.
    """
    runs = runs_df(runs_dir)
    if runs.is_empty():
        raise ConfigError(f"runs_dir={runs_dir}: holds no finished runs")
    paths = []
    for name, frame in (("runs", runs), ("samples", samples_df(runs_dir))):
        paths.append((output or runs_dir) / f"{name}.{form}")
        write_frame(frame, paths[-1])
    return paths


def write_frame(frame: "pl.DataFrame", path: Path) -> None:
    """Write a frame atomically, as CSV, JSON (a list of rows) or Parquet by the path's suffix.

    Raises:
        OSError: the file cannot be written; polars has errors of its own for a full disk.
    """
    content = io.BytesIO()
    getattr(frame, f"write_{path.suffix.removeprefix('.')}")(content)
    write_whole(path, content.getvalue())


def read_table(path: Path, max_rows: int, run: str | None = None) -> "pl.DataFrame":
    """Read a Parquet file of at most `max_rows` rows of numbers and strings.

    A file of a kilobyte may hold millions of rows, or gigabytes of one repeated string. If `run` is given, only rows
    with that value of the column `folder` are counted and read.

    Raises:
        TooLargeError: the file has more rows, `MOST_BYTES` or more of strings, or columns of other types.
        ConfigError: polars is not installed.
    """
    library = import_polars()
    rows = library.scan_parquet(check_file(path), glob=False)
    if run is not None:
        rows = rows.filter(library.col("folder") == run)
    count = rows.select(library.len()).collect().item()  # first, as strings take memory for each row
    if count > max_rows:
        raise TooLargeError(
            f"{path.name}: has {count} rows, the records give {max_rows} at most; copy the dataset again"
        )
    kinds, plain = rows.collect_schema(), (library.String, library.Boolean, library.Null)
    if other := [name for name, kind in kinds.items() if not (kind.is_numeric() or kind in plain)]:
        raise TooLargeError(f"{path.name}: column {other[0]!r:.60} must hold numbers or texts; copy it again")
    texts = [library.col(name) for name, kind in kinds.items() if kind == library.String]
    sizes = [text.str.len_bytes().cast(library.UInt64).sum() for text in texts]
    if sizes and sum(rows.select(sizes).collect().row(0)) >= MOST_BYTES:
        raise TooLargeError(f"{path.name}: has a gibibyte of texts or more, which is not read; copy it again")
    table: pl.DataFrame = rows.collect()
    return table
