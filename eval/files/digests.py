"""Hashes of references and weights, cached while the files are unchanged."""

import logging
from pathlib import Path

from kvbench.core.files import hash_content, hash_path
from kvbench.core.kept import FileCache
from kvbench.eval.files.samples import map_in_threads
from kvbench.eval.files.store import find_folder

log = logging.getLogger(__name__)

MIN_BYTES = 1 << 20
"""Minimum total size of files whose hashes are cached on disk."""


def hash_files_at(path: Path) -> dict[str, str]:
    """Return the SHA-256 of a file, or of each visible file directly in a folder, by name in ascending order.

    Files that are unchanged since an earlier call are not read.

    Raises:
        OSError: the path is missing, or a file cannot be read.
    """
    files = [path]
    if path.is_dir():
        files = sorted(entry for entry in path.iterdir() if entry.name[0] != "." and not entry.is_dir())
    kept = FileCache(find_folder() / f"{hash_content(str(path.absolute()))[:16]}-digests", "SHA-256")
    hashes = map_in_threads(lambda file: kept.get(file.name, [file], lambda: hash_path(file)), files)
    if sum(file.stat().st_size for file in files) >= MIN_BYTES and not kept.save():
        log.warning("hashes cannot be kept in %s: the next call reads files again", find_folder())
    return {file.name: sha256 for file, sha256 in zip(files, hashes, strict=True)}


def digest_path(path: Path) -> str:
    """Return a digest of the content of a file, or of names and contents of the files directly in a folder.

    Raises:
        OSError: the path is missing or an empty folder, or a file cannot be read.
    """
    hashes = hash_files_at(path)
    if not hashes:  # the disk may not be mounted
        raise FileNotFoundError(f"{path} holds no files")
    return hash_content("".join(f"{name} {sha256}\n" for name, sha256 in hashes.items()))
