"""Cache of the rows of finished runs: one Parquet file beside them, which may be deleted at any time.

A row is made again if its results.json has another size or time. A damaged row or file, and one written by another
version of the program, is made again. Any number of processes may share the file: each replaces it as a whole.
"""

import json
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvbench.core.files import find_obstacle, hash_content, write_beside
from kvbench.data import flatten
from kvbench.data.flatten import Kind, Row, find_kinds, flatten_run, merge_kinds
from kvbench.data.optional import import_polars
from kvbench.runs.record.results import FILE, read_results

NAME = ".rows.parquet"
VERSION = zlib.crc32(Path(flatten.__file__).read_bytes())
"""Start of every row's checksum: rows made by other rules are not valid."""


class Stamp(NamedTuple):
    """Time in ns and size in bytes of a file; they change when the file does."""

    time: int
    size: int


class Lines(NamedTuple):
    """Rows as JSON.

    Attributes:
        texts: one object per row, values by column.
        kinds: type of each column over all rows.
    """

    texts: list[bytes]
    kinds: dict[str, Kind]


class _Row(NamedTuple):
    """A run's row as a row of the file: `text` and `kinds` are JSON, `crc` is a checksum of all other fields."""

    folder: str
    time: int
    size: int
    text: bytes
    kinds: bytes
    crc: int

    @classmethod
    def make(cls, runs_dir: Path, folder: str, stamp: Stamp) -> "_Row | None":
        """Read a run's results; None if they were deleted since they were found."""
        run = read_results(runs_dir / folder)
        if run is None:
            return None
        row: Row = {"folder": folder, **flatten_run(run)}
        made = cls(folder, *stamp, json.dumps(row).encode(), json.dumps(find_kinds(row)).encode(), 0)
        return made._replace(crc=made.checksum)

    @property
    def checksum(self) -> int:
        """The `crc` of an undamaged row of this version."""
        key = f"{self.folder} {self.time} {self.size}".encode()
        return zlib.crc32(self.text, zlib.crc32(self.kinds, zlib.crc32(key, VERSION)))


def load_rows(runs_dir: Path) -> Lines:
    """Return a row for each finished run under a folder, in order of their folders.

    Raises:
        ConfigError: a results.json is damaged, or polars is missing.
    """
    found, place = dict(scan_results(runs_dir)), locate_cache(runs_dir)
    known = _read_cache(place)
    valid = {name: row for name, row in known.items() if found.get(name) == Stamp(row.time, row.size)}
    made = (_Row.make(runs_dir, name, stamp) for name, stamp in found.items() if name not in valid)
    rows = valid | {row.folder: row for row in made if row is not None}
    if rows != known:
        _write_cache(place, rows.values())
    ordered = [rows[name] for name in sorted(rows)]
    return Lines([row.text for row in ordered], merge_kinds(map(json.loads, {row.kinds for row in ordered})))


def scan_results(runs_dir: Path) -> Iterator[tuple[str, Stamp]]:
    """Yield the folder of each finished run, relative to `runs_dir`, and the stamp of its results."""
    for model in _list_folders(runs_dir):
        for run in _list_folders(model.path):
            try:
                state = os.stat(f"{run.path}/{FILE}")  # noqa: PTH116 (a `Path` for each takes as long as all else)
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
    """Return the cache's path: in the folder of runs, or among the user's caches if that folder is not writable."""
    if find_obstacle(runs_dir) is None:
        return runs_dir / NAME
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvbench"
    return caches / f"rows-{hash_content(str(runs_dir.absolute()))[:16]}.parquet"


def _read_cache(place: Path) -> dict[str, _Row]:
    """Return the undamaged rows of this version, by folder; none if the file is missing or unreadable."""
    polars = import_polars()
    try:
        rows = polars.read_parquet(place.read_bytes()).select(_Row._fields).iter_rows()
        return {row.folder: row for row in map(_Row._make, rows) if row.crc == row.checksum}
    except (OSError, polars.exceptions.PolarsError, polars.exceptions.PanicException):
        return {}


def _write_cache(place: Path, rows: Iterable[_Row]) -> None:
    """Replace the file, unless it cannot be written."""
    polars = import_polars()
    with suppress(OSError, polars.exceptions.PolarsError), write_beside(place) as beside:
        polars.DataFrame(list(rows), schema=_Row.__annotations__, orient="row").write_parquet(beside)
