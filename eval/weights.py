"""Weight files of the evaluators: where they may lie, are they the right ones, what to do without them.

Libraries trust whatever lies in their caches under the right name, so every file is hashed here before it is
read.
"""

import hashlib
import os
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

CHUNK = 1 << 20


class WeightError(RuntimeError):
    """A weight file is missing or is not the one it should be."""


@dataclass(frozen=True)
class Weight:
    """One weight file.

    Attributes:
        file: its name.
        url: where to get it.
        sha256: its hash; None accepts any content (the hash is recorded all the same).
        size: bytes.
        places: folders of library caches, with ~ and $VARIABLES.
        how: what to do when there is no address to fetch it from.
        path: the file itself, if configured; `pkg://package/inside/it` names a file that ships with a
            package.
    """

    file: str
    url: str = ""
    sha256: str | None = None
    size: int | None = None
    places: tuple[str, ...] = ()
    how: str = ""
    path: str | None = None

    def find(self) -> Path | None:
        """The configured file, else the one in $KVBENCH_WEIGHTS or a library's cache; None if missing."""
        if self.path is not None:
            candidates = [_resolve(self.path)]
        else:
            folders = ("$KVBENCH_WEIGHTS", *self.places)
            candidates = [Path(os.path.expandvars(folder)).expanduser() / self.file for folder in folders]
        return next((path for path in candidates if path.is_file()), None)

    def require(self) -> tuple[Path, str]:
        """The file and its SHA-256.

        Raises:
            WeightError: it is missing, or its hash is not the expected one.
        """
        path = self.find()
        if path is None:
            raise WeightError(self.remedy())
        sha256 = file_sha256(path)
        if self.sha256 is not None and sha256 != self.sha256:
            raise WeightError(
                f"{path} is not {self.file}: sha256 {sha256}, expected {self.sha256}. Fetch it again"
            )
        return path, sha256

    def remedy(self) -> str:
        """What to do when it is missing: one line with file, address, size, hash, places and command."""
        missing = f"weights missing: {self.file if self.path is None else self.path}. "
        if not self.url:
            return missing + self.how
        facts = [f"{self.size / 1e6:.0f} MB"] if self.size else []
        facts += [f"sha256 {self.sha256}"] if self.sha256 else []
        places = ("$KVBENCH_WEIGHTS", *self.places)
        folder = places[0] if "KVBENCH_WEIGHTS" in os.environ else places[-1]
        command = f"curl -fL --create-dirs -o {folder}/{self.file} {self.url}"
        known = f"Get {self.url} ({', '.join(facts)}), put it in {' or '.join(places)}"
        return f"{missing}{known}, for example: {command}"


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, remembered for as long as its size and modification time stay."""
    status = path.stat()
    return _hash(path, status.st_size, status.st_mtime_ns)


@lru_cache
def _hash(path: Path, size: int, modified: int) -> str:  # size and time are part of the key
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(CHUNK):
            digest.update(block)
    return digest.hexdigest()


def _resolve(path: str) -> Path:
    if not path.startswith("pkg://"):
        return Path(os.path.expandvars(path)).expanduser()
    package, _, inside = path.removeprefix("pkg://").partition("/")
    return Path(str(files(package) / inside))
