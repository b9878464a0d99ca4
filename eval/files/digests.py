"""Cache of hashes of reference files by size and times, so that unchanged files are not read again."""

import json
import logging
import os
import time
from pathlib import Path

from kvbench.core.files import hash_content, hash_path, parse_json, read_bytes, write_whole
from kvbench.eval.files.samples import map_in_threads
from kvbench.eval.files.store import find_folder

log = logging.getLogger(__name__)

MIN_BYTES = 1 << 20
"""Smallest total size of files whose hashes are kept."""
TICK = 2 * 10**9
"""Nanoseconds in which a file may change twice and keep its times, on the coarsest file systems."""

FileState = tuple[int, ...]
"""Size, times of modification and of change in nanoseconds, and inode of a file."""


def hash_files_at(path: Path) -> dict[str, str]:
    """Return the SHA-256 of a file, or of each file directly in a folder without hidden ones, by name in order.

    Files whose size, times and inode are as at an earlier call are not read.

    Raises:
        OSError: the path is missing, or a file cannot be read.
    """
    folder, states = _read_states(path)
    cache = find_folder() / f"{hash_content(str(path.absolute()))[:16]}-digests.json"
    is_kept = sum(size for size, *_ in states.values()) >= MIN_BYTES
    known = _read_known(cache) if is_kept else {}
    current = {name: known[name][1] for name in states if name in known and known[name][0] == states[name]}
    changed = [name for name in states if name not in current]
    started = time.time_ns()
    current |= zip(changed, map_in_threads(lambda name: hash_path(folder / name), changed), strict=True)
    if changed and is_kept:
        # A file that changed just now may change again without another time.
        settled = [name for name, (_, _, changed_at, _) in states.items() if changed_at < started - TICK]
        _write_known(cache, {name: (states[name], current[name]) for name in settled})
    return {name: current[name] for name in states}


def digest_path(path: Path) -> str:
    """Return a digest of the content of a file, or of names and contents of the files directly in a folder.

    Raises:
        OSError: the path is missing or an empty folder, or a file cannot be read.
    """
    hashes = hash_files_at(path)
    if not hashes:  # a disk may not be mounted
        raise FileNotFoundError(f"{path} holds no files")
    return hash_content("".join(f"{name} {sha256}\n" for name, sha256 in hashes.items()))


def _read_states(path: Path) -> tuple[Path, dict[str, FileState]]:
    """Return the folder of a file, or a folder itself, and the state of each file by name in order."""
    if not path.is_dir():
        return path.parent, {path.name: _describe(path.stat())}
    with os.scandir(path) as entries:
        states = {
            one.name: _describe(one.stat()) for one in entries if one.name[0] != "." and not one.is_dir()
        }
    return path, dict(sorted(states.items()))


def _describe(status: os.stat_result) -> FileState:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _read_known(cache: Path) -> dict[str, tuple[FileState, str]]:
    """Return state and hash of files by name; nothing if the cache is missing or damaged."""
    try:
        digest, _, content = read_bytes(cache).partition(b"\n")
        if digest.decode() != hash_content(content):
            raise ValueError("its content has another hash")
        return {name: (tuple(state), sha256) for name, (state, sha256) in parse_json(content).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        log.warning("%s cannot be used (%s): files are read again", cache, error)
        return {}


def _write_known(cache: Path, known: dict[str, tuple[FileState, str]]) -> None:
    content = json.dumps(known)
    try:
        write_whole(cache, f"{hash_content(content)}\n{content}")
    except OSError as error:
        log.warning("hashes cannot be kept in %s (%s): the next call reads files again", cache, error)
