"""Cache of the rows of finished runs: one Parquet file in their folder, which may be deleted at any time.

A row is rebuilt if the size or time of its results.json changed, if it is damaged, or if another version wrote it. Any
number of processes may share the file: each replaces it as a whole.
"""

import importlib
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from kvbench.core.config import ConfigError
from kvbench.core.files import find_obstacle, hash_content, read_bytes, write_beside
from kvbench.data import flatten
from kvbench.data.flatten import ColumnType, FlatRow, find_kinds, flatten_run, merge_kinds
from kvbench.runs.record.earlier import EarlierRun
from kvbench.runs.record.results import FILE, read_results

NAME = ".rows.parquet"
VERSION = zlib.crc32(Path(flatten.__file__).read_bytes())
"""Initial value of each row's checksum, so that rows of another version of `flatten` are invalid."""


class Stamp(NamedTuple):
    """Modification time in ns and size in bytes of a file."""

    time: int
    size: int


class JsonRows(NamedTuple):
    """Rows as JSON.

    Attributes:
        texts: a JSON object per row, values by column.
        kinds: type of each column over all rows.
    """

    texts: list[bytes]
    kinds: dict[str, ColumnType]


class _CachedRow(NamedTuple):
    """A run's row in the cache: `text` and `kinds` are JSON, `crc` is a checksum of all other fields."""

    folder: str
    time: int
    size: int
    text: bytes
    kinds: bytes
    crc: int

    @classmethod
    def make(cls, runs_dir: Path, folder: str, stamp: Stamp) -> "_CachedRow | None":
        """Make the row of a run from its results; None if they were deleted meanwhile, or are of an earlier version."""
        try:
            run = read_results(runs_dir / folder)
        except EarlierRun:
            return None
        if run is None:
            return None
        row: FlatRow = {"folder": folder, **flatten_run(run)}
        cached = cls(folder, *stamp, json.dumps(row).encode(), json.dumps(find_kinds(row)).encode(), 0)
        return cached._replace(crc=cached.checksum)

    @property
    def checksum(self) -> int:
        """Checksum of the other fields and of `VERSION`."""
        key = f"{self.folder} {self.time} {self.size}".encode()
        return zlib.crc32(self.text, zlib.crc32(self.kinds, zlib.crc32(key, VERSION)))


def import_polars() -> ModuleType:
    """Return polars, an optional dependency.

    Raises:
        ConfigError: polars is not installed.
    """
    try:
        return importlib.import_module("polars")
    except ImportError:
        raise ConfigError('polars is missing; install it with pip install "kvbench[data]"') from None


def load_rows(runs_dir: Path) -> JsonRows:
    """Return a row for each finished run under a folder, sorted by folder.

    Raises:
        ConfigError: a results.json is damaged, or polars is missing.
    """
    stamps, path = dict(scan_results(runs_dir)), locate_cache(runs_dir)
    known = _read_cache(path)
    valid = {name: row for name, row in known.items() if stamps.get(name) == Stamp(row.time, row.size)}
    new = (_CachedRow.make(runs_dir, name, stamp) for name, stamp in stamps.items() if name not in valid)
    rows = valid | {row.folder: row for row in new if row is not None}
    if rows != known:
        _write_cache(path, rows.values())
    ordered = [rows[name] for name in sorted(rows)]
    return JsonRows(
        [row.text for row in ordered], merge_kinds(map(json.loads, {row.kinds for row in ordered}))
    )


def scan_results(runs_dir: Path) -> Iterator[tuple[str, Stamp]]:
    """Yield the folder of each finished run, relative to `runs_dir`, and the stamp of its results."""
    for model in _list_folders(runs_dir):
        for run in _list_folders(model.path):
            try:
                state = os.stat(f"{run.path}/{FILE}")  # noqa: PTH116 (`Path` would double the time)
            except OSError:
                continue
            yield f"{model.name}/{run.name}", Stamp(state.st_mtime_ns, state.st_size)


def _list_folders(path: str | Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return [entry for entry in entries if entry.is_dir()]
    except OSError:
        return []


def locate_cache(runs_dir: Path) -> Path:
    """Return the cache's path: in the folder of runs, or in the user's cache folder if that is not writable."""
    if find_obstacle(runs_dir) is None:
        return runs_dir / NAME
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvbench"
    return caches / f"rows-{hash_content(str(runs_dir.absolute()))[:16]}.parquet"


def _read_cache(path: Path) -> dict[str, _CachedRow]:
    """Return the undamaged rows of this version, by folder; none if the file is missing or unreadable."""
    polars = import_polars()
    try:
        rows = polars.read_parquet(read_bytes(path)).select(_CachedRow._fields).iter_rows()
        return {row.folder: row for row in map(_CachedRow._make, rows) if row.crc == row.checksum}
    except (OSError, polars.exceptions.PolarsError, polars.exceptions.PanicException):
        return {}


def _write_cache(path: Path, rows: Iterable[_CachedRow]) -> None:
    """Replace the file if it is writable."""
    polars = import_polars()
    with suppress(OSError, polars.exceptions.PolarsError), write_beside(path) as beside:
        polars.DataFrame(list(rows), schema=_CachedRow.__annotations__, orient="row").write_parquet(beside)
