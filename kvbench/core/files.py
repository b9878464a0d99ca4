"""Files: bounded reading, atomic writes, hashes, and paths inside packages."""

import contextlib
import errno
import hashlib
import io
import json
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

CHUNK_BYTES = 1 << 22
"""Bytes that are read at a time for a hash."""
MAX_BYTES = 1 << 28
"""Maximum bytes of a file that is read whole."""
MAX_STREAMED = 1 << 40
"""Maximum bytes of a file that is read in parts or mapped, such as weights."""
MAX_NUMBER, MAX_INTEGER = 1e60, 2**63 - 1
"""Maximum magnitude of floats and integers in a run's files: their powers are finite, and tables have 64 bits."""
MAX_DIGITS = 20
"""Maximum number of characters of a JSON integer."""
FILES_PER_FOLDER = 500
"""Maximum number of samples in a folder."""


def open_file(path: Path, largest: int = MAX_BYTES) -> BinaryIO:
    """Open an untrusted file for reading; never wait for a pipe or device.

    Raises:
        OSError: the file cannot be opened, is not a regular file, or has more than `largest` bytes; the error names it.
    """
    file = open(path, "rb", opener=_open_at_once)  # noqa: SIM115 (the caller closes it)
    status = os.fstat(file.fileno())
    if stat.S_ISREG(status.st_mode) and status.st_size <= largest:
        return file
    file.close()
    if stat.S_ISREG(status.st_mode):
        raise OSError(errno.EFBIG, f"larger than {largest >> 20} MiB", str(path))
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)  # a pipe without a writer would block


def check_file(path: Path) -> Path:
    """Return the path of a file for a library that opens it by itself; raises the errors of `open_file`."""
    open_file(path, MAX_STREAMED).close()
    return path


def read_bytes(path: Path, largest: int = MAX_BYTES) -> bytes:
    """Return a file's content up to its length at opening; raises the errors of `open_file`."""
    with open_file(path, largest) as file:
        return file.read(os.fstat(file.fileno()).st_size)


def read_text(path: Path, errors: str = "strict") -> str:
    r"""Return the text of a file in UTF-8 without its byte order mark; `\r\n` and `\r` become `\n`.

    Raises:
        OSError: see `open_file`.
        ValueError: the file is not UTF-8, and `errors` is `strict`.
    """
    return io.TextIOWrapper(io.BytesIO(read_bytes(path)), "utf-8-sig", errors).read()


def name_sample(index: int, suffix: str = "") -> str:
    """Return the path of a sample's file in the folder of all samples of a run.

    The first 500 are in that folder, each further 500 in a subfolder: network file systems list large folders slowly.

    >>> name_sample(17, ".png"), name_sample(1731, ".png")
    ('000017.png', '001500/001731.png')
    """
    folder = f"{index - index % FILES_PER_FOLDER:06d}/" if index >= FILES_PER_FOLDER else ""
    return f"{folder}{index:06d}{suffix}"


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the path to system errors without a file name, such as errors of writes to an open file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextlib.contextmanager
def write_beside(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the folder of `path`; its file replaces `path` when the block ends.

    Readers see the old file or the new one, never a part, even after a power failure: the folder is not synced, but if
    the rename is lost, the old file is whole. After an error no part of the new file remains.
    Missing parent folders are created.

    Raises:
        OSError: the file cannot be written; the error names it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{_name_space()}-{os.getpid()}-{uuid.uuid4().hex[:8]}")
    try:
        with naming(path):
            yield beside
            with beside.open("rb") as file:
                os.fsync(file.fileno())
            beside.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):  # the disk may be what failed
            beside.unlink()
        raise


def remove_unfinished(folder: Path) -> None:
    """Remove temporary files of `write_beside` that killed processes left in a folder and below.

    Files of running processes, and of other machines and containers, are kept.
    """
    for path in folder.rglob(f".*.{_name_space()}-*-*"):
        process = path.name.split("-")[-2]
        if process.isdecimal() and not _is_running(int(process)):
            with contextlib.suppress(OSError):  # another process may remove it too
                path.unlink()


def name_machine() -> str:
    """Return an identifier of this machine that changes when it restarts."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename


@lru_cache
def _name_space() -> str:
    """Return eight digits that processes share if they see the same process ids."""
    space = Path("/proc/self/ns/pid")  # each container numbers its processes
    return hash_content(name_machine(), str(space.readlink()) if space.is_symlink() else "")[:8]


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # the process belongs to another user
        return True
    return True


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file atomically, text in UTF-8; see `write_beside`."""
    with write_beside(path) as beside:
        beside.write_bytes(content.encode() if isinstance(content, str) else content)


def parse_json(content: str | bytes, *, finite: bool = False) -> Any:
    """Parse a JSON value; `finite` rejects NaN, infinities, and numbers beyond `MAX_NUMBER` or `MAX_INTEGER`.

    Raises:
        ValueError: the content is not JSON, is nested too deeply, or has a number that `finite` rejects.
    """
    try:
        if not finite:
            return json.loads(content)
        return json.loads(
            content, parse_constant=_refuse_constant, parse_float=_read_float, parse_int=_read_int
        )
    except RecursionError as error:
        raise ValueError(str(error)) from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def _read_float(text: str) -> float:
    value = float(text)
    if abs(value) > MAX_NUMBER:
        raise ValueError(f"{text:.20} is too large for a number")
    return value


def _read_int(text: str) -> int:
    if len(text) > MAX_DIGITS or abs(value := int(text)) > MAX_INTEGER:
        raise ValueError(f"{text:.20} is too large for a whole number")
    return value


def find_obstacle(folder: Path) -> str | None:
    """Return why a folder, which need not exist, cannot be written to; None if it can."""
    if "\0" in str(folder):
        return "its name contains a null character"
    try:
        parent = find_existing(folder)
        if not parent.is_dir():
            return f"{parent} is not a folder"
        if not os.access(parent, os.W_OK | os.X_OK):
            return f"no permission for {parent}"
        # root may write into folders that take no files, such as /proc
        with tempfile.TemporaryFile(dir=parent):
            return None
    except OSError as error:  # a name that is too long, a full disk
        return str(error)


def find_existing(folder: Path) -> Path:
    """Return the folder, or its closest parent that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def count_free_bytes(folder: Path) -> int:
    """Return the free bytes on the disk of a folder, which need not exist."""
    return shutil.disk_usage(find_existing(folder)).free


def hash_content(*parts: str | bytes | memoryview) -> str:
    """Return the SHA-256 of concatenated bytes and UTF-8 text as 64 hex digits."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
    return digest.hexdigest()


def derive_seed(name: str) -> int:
    """Return the seed of a name: 63 bits of its SHA-256."""
    return int(hash_content(name)[:16], 16) >> 1


def hash_path(path: Path) -> str:
    """Return the SHA-256 of a file; raises the errors of `open_file`."""
    return hash_files([path])


def hash_files(paths: Iterable[Path]) -> str:
    """Return the SHA-256 of the concatenated contents of files; raises the errors of `open_file`."""
    digest = hashlib.sha256()
    for path in paths:
        with open_file(path, MAX_STREAMED) as file:
            while block := file.read(CHUNK_BYTES):
                digest.update(block)
    return digest.hexdigest()


def hash_values(values: object) -> str:
    """Return the SHA-256 of nested settings as JSON with sorted keys; other objects are written as `str`."""
    return hash_content(json.dumps(values, sort_keys=True, default=str))


def resolve_path(text: str) -> Path:
    """Return the path of a setting, with ~ and $VARIABLES expanded; `pkg://package/path` is inside a package.

    If the package is not installed, the path does not exist.
    """
    if not text.startswith("pkg://"):
        return Path(os.path.expandvars(text)).expanduser()
    package, _, inside = text.removeprefix("pkg://").partition("/")
    try:
        spec = find_spec(package)  # does not import it, which may take seconds
    except ModuleNotFoundError:
        spec = None
    places = None if spec is None else spec.submodule_search_locations
    return Path(places[0], inside) if places else Path(text)
