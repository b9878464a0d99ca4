"""Rows of finished runs, remembered beside them in a file that may be thrown away at any time.

A run's row is made again when its results.json has another size or time. A file that is damaged, of another program or
of another version of this one is made anew; where it cannot be used, nothing is remembered. Any number of processes may
share it.
"""

import json
import os
import sqlite3
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from kvbench.core.files import find_obstacle, hash_content
from kvbench.data import flatten
from kvbench.data.flatten import Kind, Row, find_kinds, flatten_run, merge_kinds
from kvbench.runs.record.results import FILE, read_results

NAME = ".rows.sqlite"
OWNER = 0x6B766263
"""SQLite's `application_id` of these files: kvbc in ASCII."""
VERSION = zlib.crc32(Path(flatten.__file__).read_bytes()) & 0x7FFFFFFF
"""Their `user_version`: rows that were made by other rules are no rows of this version."""
PATIENCE = 20.0
"""Seconds that a process waits for another one that writes."""
BATCH = 1000
"""Rows that are written together; a process that is stopped leaves those before."""
TABLES = (
    "CREATE TABLE IF NOT EXISTS rows (folder TEXT PRIMARY KEY, time INTEGER, size INTEGER, text BLOB, crc INTEGER, "
    "shape INTEGER)",
    "CREATE TABLE IF NOT EXISTS shapes (shape INTEGER PRIMARY KEY, kinds BLOB)",
)


class Stamp(NamedTuple):
    """What changes when a file does: its time in ns and its size in bytes."""

    time: int
    size: int


class Lines(NamedTuple):
    """Rows as JSON.

    Attributes:
        texts: an object by column each.
        kinds: what the columns of all of them hold.
    """

    texts: list[bytes]
    kinds: dict[str, Kind]


class _Row(NamedTuple):
    """A run's row as JSON, what its columns hold as JSON, and the stamp of what it was made from."""

    stamp: Stamp
    text: bytes
    kinds: bytes


def load_rows(runs_dir: Path) -> Lines:
    """Return a row for each finished run under a folder, in order of their own folders.

    Raises:
        ConfigError: a results.json is damaged.
    """
    found, place = dict(scan_results(runs_dir)), locate_cache(runs_dir)
    try:
        return _load(place, runs_dir, found)
    except sqlite3.OperationalError:  # out of reach, or another process writes for too long
        return _load(None, runs_dir, found)
    except sqlite3.DatabaseError:
        return _load(_clear(place), runs_dir, found)


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
    """Return where a folder's rows are remembered: in it, or among the user's caches where it cannot be written."""
    if find_obstacle(runs_dir) is None:
        return runs_dir / NAME
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvbench"
    with suppress(OSError):
        caches.mkdir(parents=True, exist_ok=True)
    return caches / f"rows-{hash_content(str(runs_dir.absolute()))[:16]}.sqlite"


def _clear(place: Path) -> Path | None:
    """Remove a file and what SQLite left beside it; return where to begin anew, None for nowhere."""
    try:
        for path in (place.with_name(f"{place.name}-journal"), place):
            path.unlink(missing_ok=True)
    except OSError:
        return None
    return place


def _load(place: Path | None, runs_dir: Path, found: Mapping[str, Stamp]) -> Lines:
    """Return the rows of some folders; those that are not remembered are made, and remembered.

    Raises:
        sqlite3.OperationalError: the file at `place` cannot be used; None is in memory.
        sqlite3.DatabaseError: it is damaged, or none of this version's.
    """
    with closing(_connect(place)) as base:
        known = _recall(base)
        rows = {
            folder: known[folder]
            for folder in found
            if folder in known and known[folder].stamp == found[folder]
        }
        missing = [folder for folder in found if folder not in rows]
        for start in range(0, len(missing), BATCH):
            made = {
                folder: _make_row(runs_dir / folder, found[folder])
                for folder in missing[start : start + BATCH]
            }
            fresh = {folder: row for folder, row in made.items() if row is not None}
            _remember(base, fresh)
            rows |= fresh
        _forget(base, known.keys() - found.keys())
    ordered = [rows[folder] for folder in sorted(rows)]
    return Lines([row.text for row in ordered], merge_kinds(map(json.loads, {row.kinds for row in ordered})))


def _make_row(folder: Path, stamp: Stamp) -> _Row | None:
    """Read a run's results; None where they are gone since they were found."""
    run = read_results(folder)
    if run is None:
        return None
    row: Row = {"folder": f"{folder.parent.name}/{folder.name}", **flatten_run(run)}
    return _Row(stamp, json.dumps(row).encode(), json.dumps(find_kinds(row)).encode())


def _connect(place: Path | None) -> sqlite3.Connection:
    """Open the cache at a place, made where there is none; None is in memory."""
    base = sqlite3.connect(":memory:" if place is None else place, timeout=PATIENCE, isolation_level=None)
    try:
        [(tables,)] = base.execute("SELECT count(*) FROM sqlite_master")
        marks = [base.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")]
        if not tables:
            with _write(base):
                for line in (*TABLES, f"PRAGMA application_id = {OWNER}", f"PRAGMA user_version = {VERSION}"):
                    base.execute(line)
        elif marks != [OWNER, VERSION]:
            raise sqlite3.DatabaseError(f"{place}: of another program or version")
    except sqlite3.Error:
        base.close()
        raise
    return base


@contextmanager
def _write(base: sqlite3.Connection) -> Iterator[None]:
    """Write all or nothing, while no other process does."""
    base.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        base.execute("ROLLBACK")
        raise
    base.execute("COMMIT")


def _recall(base: sqlite3.Connection) -> dict[str, _Row]:
    """Return all rows that are as they were written, by folder."""
    kinds = {
        shape: held
        for shape, held in base.execute("SELECT shape, kinds FROM shapes")
        if zlib.crc32(held) == shape
    }
    return {
        folder: _Row(Stamp(time, size), text, kinds[shape])
        for folder, time, size, text, crc, shape in base.execute("SELECT * FROM rows")
        if shape in kinds and zlib.crc32(text) == crc
    }


def _remember(base: sqlite3.Connection, rows: Mapping[str, _Row]) -> None:
    """Write rows, unless the file cannot take them: it is full, or another process writes for too long."""
    shapes = [(zlib.crc32(kinds), kinds) for kinds in {row.kinds for row in rows.values()}]
    values = [
        (folder, *row.stamp, row.text, zlib.crc32(row.text), zlib.crc32(row.kinds))
        for folder, row in rows.items()
    ]
    with suppress(sqlite3.OperationalError), _write(base):
        base.executemany("INSERT OR REPLACE INTO shapes VALUES (?, ?)", shapes)
        base.executemany("INSERT OR REPLACE INTO rows VALUES (?, ?, ?, ?, ?, ?)", values)


def _forget(base: sqlite3.Connection, folders: Collection[str]) -> None:
    """Remove the rows of runs that are gone."""
    if folders:
        with suppress(sqlite3.OperationalError), _write(base):
            base.executemany("DELETE FROM rows WHERE folder = ?", [(folder,) for folder in folders])
