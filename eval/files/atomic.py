"""Files written whole or not at all, and hashes of content.

`kvbench.core.files` has the same for the harness: this folder is usable without it, and it without this folder.
"""

import contextlib
import hashlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

CHUNK = 1 << 20
"""Bytes that are read at a time."""


@contextlib.contextmanager
def write_beside(path: Path) -> Iterator[Path]:
    """Give a path to write to in the folder of `path`, and put that file in its place when the block ends.

    Readers see the old file or the new one, never a part. When anything fails, whatever was written is removed.

    Args:
        path: the file to make or replace; missing folders above it are made.

    Raises:
        OSError: the file cannot be written, for want of space or of permission.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        yield beside
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):  # the disk may be what failed
            beside.unlink()
        raise


def write_whole(path: Path, text: str) -> None:
    """Write text in UTF-8 to a file, whole or not at all; see `write_beside`."""
    with write_beside(path) as beside:
        beside.write_text(text, encoding="utf-8")


def hash_content(*parts: str | bytes | memoryview) -> str:
    """Return the SHA-256 of bytes or of text in UTF-8, one part after another, as 64 hex digits."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
    return digest.hexdigest()


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file as 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
