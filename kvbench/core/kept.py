"""JSON values that a file keeps between commands, each valid while the files that it was made from are unchanged."""

import json
import time
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from kvbench.core.files import read_bytes, write_whole

TICK = 2 * 10**9
"""Nanoseconds in which a file may change twice and keep its times, on the coarsest file systems."""


class FileCache:
    """Values by name in one file, which may be deleted at any time.

    A value is made anew if size, times or inode of one of its files changed, if one had changed just before the value
    was made, if its line is damaged, or if another version wrote it. Any number of processes may share the file: each
    replaces it as a whole. A file that cannot be read or written keeps nothing.

    Args:
        path: the file.
        version: identifies the code that makes the values.
    """

    def __init__(self, path: Path, version: str) -> None:
        self._path, self._seed = path, zlib.crc32(version.encode())
        self._known = self._read()
        self._used: dict[str, tuple[bytes, bytes]] = {}

    def get(self, name: str, files: Iterable[Path], make: Callable[[], object]) -> Any:
        """Return the value of a name, made by `make` if it is not known or one of its files changed.

        The value is as JSON reads it: lists for tuples, strings for keys. Several threads may call this.
        """
        states = [find_state(path) for path in files]
        state, started = json.dumps(states).encode(), time.time_ns()
        known = self._known.get(name)
        if known is None or known[0] != state:
            known = state, json.dumps(make()).encode()
            if any(entry is not None and entry[-1] >= started - TICK for entry in states):
                return json.loads(known[1])  # the file may change again within the clock's resolution
        self._used[name] = known
        return json.loads(known[1])

    def save(self, is_current: Callable[[str], bool] = lambda _: False) -> bool:
        """Write the used values, and other values whose names are current, if the file has any others.

        Returns:
            Whether the file has these values; false without write permission, or on a full disk.
        """
        others = {name: value for name, value in self._known.items() if name not in self._used}
        self._used |= {name: value for name, value in others.items() if is_current(name)}
        if self._used == self._known:
            return True
        lines = [
            b"%08x\t%b\t%b\t%b\n" % (self._sum(*line), *line)
            for line in ((json.dumps(name).encode(), *value) for name, value in self._used.items())
        ]
        try:
            write_whole(self._path, b"".join(lines))
        except OSError:
            return False
        self._known = self._used
        return True

    def _read(self) -> dict[str, tuple[bytes, bytes]]:
        try:
            lines = read_bytes(self._path).split(b"\n")
        except OSError:
            return {}
        known = {}
        for line in lines:
            parts = line.split(b"\t")
            if len(parts) == 4 and parts[0] == b"%08x" % self._sum(*parts[1:]):
                known[json.loads(parts[1])] = parts[2], parts[3]
        return known

    def _sum(self, *parts: bytes) -> int:
        total = self._seed
        for part in parts:
            total = zlib.crc32(part, zlib.crc32(b"%d" % len(part), total))
        return total


def find_state(path: Path) -> tuple[str, int, int, int, int] | None:
    """Return name, inode, size and times of modification and of change, in ns, of a file; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return path.name, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
