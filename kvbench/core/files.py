"""Files of a run: written whole or not at all, named by their content, found inside packages."""

import contextlib
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

CHUNK = 1 << 22
"""Bytes that are hashed at a time."""
FOLDED = 500
"""Samples whose files share a folder."""


def name_sample(index: int, suffix: str = "") -> str:
    """Return the path of a sample's file in the folder of all samples of a run.

    The first 500 lie in it, every 500 more in a folder of their own: up to 250 000 samples no folder has more than 1000
    entries, which network file systems list slowly.

    >>> name_sample(17, ".png"), name_sample(1731, ".png")
    ('000017.png', '001500/001731.png')
    """
    folder = f"{index - index % FOLDED:06d}/" if index >= FOLDED else ""
    return f"{folder}{index:06d}{suffix}"


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let errors of the system that name no file, as those of a write to an open one, name this one."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextlib.contextmanager
def write_beside(path: Path) -> Iterator[Path]:
    """Give a path to write to in the folder of `path`, and put that file in its place when the block ends.

    Readers see the old file or the new one, never a part, even after a power failure. The folder itself is not synced:
    a rename that a power failure undoes leaves the old file, which is whole too. After an error no part
    of the new file remains.

    Args:
        path: the file to make or replace; missing folders above it are made.

    Raises:
        OSError: the file cannot be written, for want of space or of permission; it names the file.
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
    """Remove what killed processes left of `write_beside` in a folder and below.

    Files of processes that still run, and of other machines and containers, stay.
    """
    for path in folder.rglob(f".*.{_name_space()}-*-*"):
        process = path.name.split("-")[-2]
        if process.isdecimal() and not _is_running(int(process)):
            with contextlib.suppress(OSError):  # another process removes it too
                path.unlink()


def name_machine() -> str:
    """Return an identifier of this machine since it started."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename


@lru_cache
def _name_space() -> str:
    """Return eight digits that processes have in common if they know each other by number."""
    space = Path("/proc/self/ns/pid")  # containers of one machine number their processes each by itself
    return hash_content(name_machine(), str(space.readlink()) if space.is_symlink() else "")[:8]


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it belongs to somebody else
        return True
    return True


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all, text in UTF-8; see `write_beside`."""
    with write_beside(path) as beside:
        beside.write_bytes(content.encode() if isinstance(content, str) else content)


def parse_json(content: str | bytes, *, finite: bool = False) -> Any:
    """Return the value that JSON stands for.

    Args:
        content: one value, text in UTF-8.
        finite: refuse what Python's JSON has beside JSON's own numbers, NaN and infinities.

    Raises:
        ValueError: it is no JSON, or nested so deeply that Python cannot read it.
    """
    try:
        return json.loads(content, parse_constant=_refuse_constant if finite else None)
    except RecursionError as error:
        raise ValueError(str(error)) from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def find_obstacle(folder: Path) -> str | None:
    """Return why nothing can be written to a folder, which need not be there yet; None if nothing stands against it."""
    if "\0" in str(folder):
        return "its name holds a null"
    try:
        there = find_existing(folder)
        if not there.is_dir():
            return f"{there} is no folder"
        return None if os.access(there, os.W_OK | os.X_OK) else f"no permission for {there}"
    except OSError as error:  # a name that is too long
        return str(error)


def find_existing(folder: Path) -> Path:
    """Return the folder, or the closest one above it that exists."""
    return next(place for place in (folder, *folder.absolute().parents) if place.exists())


def count_free_bytes(folder: Path) -> int:
    """Return the bytes that are free on the disk of a folder, which need not be there yet."""
    return shutil.disk_usage(find_existing(folder)).free


def hash_content(*parts: str | bytes | memoryview) -> str:
    """Return the SHA-256 of bytes or of text in UTF-8, one part after another, as 64 hex digits."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
    return digest.hexdigest()


def derive_seed(name: str) -> int:
    """Return a generator's seed for a name: 63 bits of its SHA-256, so that seeds of similar names share nothing."""
    return int(hash_content(name)[:16], 16) >> 1


def hash_path(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hash_files([path])


def hash_files(paths: Iterable[Path]) -> str:
    """Return the SHA-256 of files one after another."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(CHUNK):
                digest.update(block)
    return digest.hexdigest()


def hash_values(values: object) -> str:
    """Return the SHA-256 of nested settings as JSON with sorted keys; what JSON cannot hold counts by its text."""
    return hash_content(json.dumps(values, sort_keys=True, default=str))


def resolve_path(text: str) -> Path:
    """Return the path that a setting names, ~ and $VARIABLES expanded; `pkg://package/inside/it` lies in a package.

    The path is one that does not exist if the package is not installed.
    """
    if not text.startswith("pkg://"):
        return Path(os.path.expandvars(text)).expanduser()
    package, _, inside = text.removeprefix("pkg://").partition("/")
    try:
        spec = find_spec(package)  # finds it without importing it, which may take seconds
    except ModuleNotFoundError:
        spec = None
    places = None if spec is None else spec.submodule_search_locations
    return Path(places[0], inside) if places else Path(text)
