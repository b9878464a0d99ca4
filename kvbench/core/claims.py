"""Claims on work between processes of one machine or of several.

A claim is a file that one process can make and no other. Its holder touches it while he works, and promises how often:
a claim that was not touched for so long has lapsed. On one machine no process waits for that: the kernel releases a
holder's lock on the file when its process ends. Ages are differences of times that the file system
gave, since the clocks of machines differ.
"""

import errno
import fcntl
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Literal

from kvbench.core.background import repeating
from kvbench.core.files import name_machine, naming, parse_json

LAPSE = 60.0
"""Seconds without a touch after which a claim has lapsed, unless its holder says otherwise."""
TOUCHES = 6
"""Number of times that a holder touches its claim in that time."""
SHORTEST, LONGEST = 0.002, 0.2
"""Seconds between two looks at a claim that is waited for, at first and at last."""
GONE = (errno.ENOENT, errno.ESTALE)
"""Errors for a file that is not there any more; NFS has the second for one that is open and was removed elsewhere."""

MACHINE = name_machine()
"""Machine on which kernel locks are valid."""


@contextmanager
def claim(path: Path, *, wait: bool = True, lapse: float = LAPSE) -> Iterator[bool]:
    """Hold the claim that a file stands for; the file exists only while the claim is held.

    A claim that a killed process leaves behind lapses. A holder who was stopped for longer than he promised may find
    that another one has taken over: what claims guard has to bear being done twice.

    Args:
        path: the file; a hidden name keeps it apart from results. Missing folders above it are made.
        wait: until the claim is free; otherwise the context is entered without it.
        lapse: seconds without a touch after which others may take the claim.

    Yields:
        Whether the claim is held.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    pause = SHORTEST
    while (file := _make(path, lapse)) is None:
        if _is_free(path):
            continue
        if not wait:
            yield False
            return
        time.sleep(pause)
        pause = min(2 * pause, LONGEST)
    with file, repeating(lambda: _touch(file), lapse / TOUCHES):
        try:
            yield True
        finally:
            if _is_same(file, path):  # nobody has taken over
                path.unlink(missing_ok=True)


def is_held(path: Path) -> bool:
    """Return whether a living process holds a claim."""
    return _judge(path) == "held"


def read_clock(folder: Path) -> float:
    """Return what time it is for the file system of a folder, seconds as in `st_mtime`."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_mtime


def _make(path: Path, lapse: float) -> IO[str] | None:
    """Make a claim's file, say in it whose it is, and return it open; None if it is there already."""
    try:
        file = path.open("x")
    except FileExistsError:
        return None
    with naming(path):
        try:
            machine = MACHINE if _lock(file, fcntl.LOCK_EX) else None
            file.write(json.dumps({"machine": machine, "lapse": lapse}))
            file.flush()
        except BaseException:
            with suppress(OSError):  # it is tried again to write what could not be written
                file.close()
            path.unlink(missing_ok=True)
            raise
    return file


def _lock(file: IO[str], kind: int) -> bool:
    """Lock a file while it is open; return whether that worked. Some file systems cannot."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _touch(file: IO[str]) -> None:
    """Give an open file the file system's time, if it can."""
    with suppress(OSError):
        os.utime(file.fileno())


def _judge(path: Path) -> Literal["free", "held", "lapsed"]:
    """Look at a claim. Opening a file also asks a file server for the newest time of it."""
    try:
        with path.open() as file:
            about = _read(file)
            if about.get("machine") == MACHINE:
                return "lapsed" if _lock(file, fcntl.LOCK_SH) else "held"
            age = read_clock(path.parent) - os.fstat(file.fileno()).st_mtime
    except OSError as error:
        if error.errno not in GONE:
            raise
        return "free"
    return "lapsed" if age > float(about.get("lapse", LAPSE)) else "held"


def _read(file: IO[str]) -> dict[str, str | float]:
    """Return what a claim says; nothing while its holder has not come to write it."""
    try:
        about = parse_json(file.read())
    except ValueError:
        return {}
    return about if isinstance(about, dict) else {}


def _is_free(path: Path) -> bool:
    """Return whether a claim can be made, after removing one that has lapsed.

    Removing is claimed too: of several who saw the same claim lapse, a slow one would else remove the next holder's.
    """
    if (state := _judge(path)) == "lapsed":
        with claim(path.with_name(f"{path.name}~"), wait=False) as mine:
            if mine and (state := _judge(path)) == "lapsed":
                path.unlink(missing_ok=True)
                state = "free"
    return state == "free"


def _is_same(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError as error:
        if error.errno not in GONE:
            raise
        return False
