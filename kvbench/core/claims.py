"""Claims on work between processes of one machine or of several.

A claim is a file that only one process can create. Its holder touches it while it works; a claim that has not been
touched for `lapse` seconds has lapsed. On one machine the kernel releases the holder's lock when its process ends, so
no process waits for the lapse. Ages are differences of file system times, since clocks of machines differ. If the file
server's clock was set back, a claim may have a future time; a process that sees it sets it to the present.
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
from typing import IO, Any, BinaryIO, Literal

from kvbench.core.background import repeating
from kvbench.core.files import name_machine, naming, open_file, parse_json

LAPSE = 60.0
"""Default seconds without a touch after which a claim has lapsed."""
MAX_LAPSE = 86400.0
"""Maximum lapse in seconds; a claim file with a longer or invalid one has the default."""
TOUCHES_PER_LAPSE = 6
"""Touches of a claim by its holder per lapse."""
MIN_PAUSE, MAX_PAUSE = 0.002, 0.2
"""Shortest and longest polling interval, in seconds, while another process holds the claim."""
MISSING_FILE_ERRORS = (errno.ENOENT, errno.ESTALE)
"""`errno` values of a removed file; NFS gives ESTALE for an open file that another machine removed."""
MACHINE = name_machine()
"""Identifier of the machine on which kernel locks are valid."""


@contextmanager
def claim(path: Path, *, wait: bool = True, lapse: float = LAPSE) -> Iterator[bool]:
    """Hold a claim, whose file exists only while the claim is held.

    The claim of a killed process lapses. Another process may take over the claim of a process that was stopped for
    longer than `lapse`, so the claimed work must tolerate being done twice.

    Args:
        path: the file, with a hidden name; missing parent folders are created.
        wait: wait until the claim is free; otherwise the context is entered without it.
        lapse: seconds without a touch after which other processes may take the claim.

    Yields:
        Whether the claim is held.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    pause = MIN_PAUSE
    while (file := _make(path, lapse)) is None:
        if remove_lapsed(path):
            continue
        if not wait:
            yield False
            return
        time.sleep(pause)
        pause = min(2 * pause, MAX_PAUSE)
    with file, repeating(lambda: _touch(file), lapse / TOUCHES_PER_LAPSE):
        try:
            yield True
        finally:
            if _is_same(file, path):  # nobody took the claim over
                path.unlink(missing_ok=True)


def is_held(path: Path) -> bool:
    """Return whether a living process holds a claim; False for an unreadable path or a folder."""
    try:
        return _judge(path) == "held"
    except OSError:
        return False


def remove_lapsed(path: Path) -> bool:
    """Remove the claim if it has lapsed; return whether it is free.

    The removal is claimed too: otherwise a slow process that saw the lapse could remove the next holder's claim.
    """
    if (state := _judge(path)) == "lapsed":
        with claim(path.with_name(f"{path.name}~"), wait=False) as is_mine:
            if is_mine and (state := _judge(path)) == "lapsed":
                path.unlink(missing_ok=True)
                state = "free"
    return state == "free"


def read_clock(folder: Path) -> float:
    """Return the time of a folder's file system, in seconds like `st_mtime`."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_mtime


def _make(path: Path, lapse: float) -> IO[str] | None:
    """Create a claim's file with its machine and lapse, and return it open; None if it exists."""
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
            with suppress(OSError):  # closing writes the remaining bytes again
                file.close()
            path.unlink(missing_ok=True)
            raise
    return file


def _lock(file: IO[Any], kind: int) -> bool:
    """Lock a file while it is open; return False if its file system has no locks or it is locked."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _touch(file: IO[Any]) -> None:
    """Set an open file's time to the file system's; ignore errors."""
    with suppress(OSError):
        os.utime(file.fileno())


def _judge(path: Path) -> Literal["free", "held", "lapsed"]:
    """Return the state of a claim.

    A claim whose time is further ahead than its lapse is touched here; a dead holder's then lapses like any other.

    Raises:
        OSError: something other than a claim is at the path; the error names it.
    """
    if (file := _open(path)) is None:
        return "free"
    try:
        with file:
            machine, lapse = _read(file)
            if machine == MACHINE:
                return "lapsed" if _lock(file, fcntl.LOCK_SH) else "held"
            age = read_clock(path.parent) - os.fstat(file.fileno()).st_mtime
            if age < -lapse:
                _touch(file)
    except OSError as error:
        if error.errno not in MISSING_FILE_ERRORS:
            raise
        return "free"
    return "lapsed" if age > lapse else "held"


def _open(path: Path) -> BinaryIO | None:
    """Open a claim, which makes a file server report its newest time; None if there is none."""
    try:
        if path.is_symlink():
            raise OSError(errno.ELOOP, "Is a symbolic link")
        return open_file(path)
    except OSError as error:
        if error.errno in MISSING_FILE_ERRORS:
            return None
        raise OSError(error.errno, f"{error.strerror}, in place of a claim; remove it", str(path)) from None


def _read(file: BinaryIO) -> tuple[object, float]:
    """Return machine and lapse of a claim; None and `LAPSE` before its holder has written them."""
    try:
        about = parse_json(file.read())
    except ValueError:
        about = None
    known = about if isinstance(about, dict) else {}
    lapse: Any = known.get("lapse")
    is_valid = type(lapse) in (int, float) and 0 < lapse <= MAX_LAPSE  # false for NaN
    return known.get("machine"), float(lapse) if is_valid else LAPSE


def _is_same(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError as error:
        if error.errno not in MISSING_FILE_ERRORS:
            raise
        return False
