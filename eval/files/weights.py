"""Weight files of the evaluators: where they are searched, their hashes, and the remedy if one is missing.

Libraries trust whatever lies in their caches under the right name, so every file is hashed here before it is
read.
"""

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvbench.core.files import hash_path, resolve_path

HOME_VARIABLE = "KVBENCH_WEIGHTS"
HOME = "~/.cache/kvbench/weights"
"""Folder of fetched files, which is always searched."""
FETCH = "make weights (python -m kvbench.eval.files.fetch)"
TORCH_CACHES = ("$TORCH_HOME/hub/checkpoints", "~/.cache/torch/hub/checkpoints")
HUB_CACHES = ("$HF_HUB_CACHE", "$HF_HOME/hub", "~/.cache/huggingface/hub")


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
        how: the remedy if it has no address.
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

    @classmethod
    def at(cls, url: str, sha256: str | None = None, **more: Any) -> "Weight":
        """Return the file at an address, under the name that ends it."""
        return cls(url.rpartition("/")[2], url, sha256, **more)

    def find(self) -> Path | None:
        """The configured file, else the one in $KVBENCH_WEIGHTS, ours or a library's cache; None if missing."""
        return next((path for path in self.candidates if path.is_file()), None)

    @property
    def candidates(self) -> list[Path]:
        """Every path at which it is looked for, best first."""
        if self.path is not None:
            return [resolve_path(self.path)]
        return [folder / self.file for folder in (*_homes(), *map(resolve_path, self.places))]

    @property
    def home(self) -> Path:
        """Path of the fetched file, in $KVBENCH_WEIGHTS if it is set, else in ~/.cache/kvbench/weights."""
        return _homes()[0] / self.file

    @property
    def pinned(self) -> bool:
        """Whether its content is known beforehand."""
        return self.sha256 is not None

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
        """Return the remedy if it is missing, in one line."""
        return _remedy(self.file, self.path, "" if self.url else self.how)

    def directions(self) -> str:
        """Return how to get it by hand: address, size, hash, places and command; `how` if it has no address."""
        if not self.url:
            return self.how
        facts = [f"{self.size / 1e6:.0f} MB"] if self.size else []
        facts.append(
            f"sha256 {self.sha256}" if self.sha256 else "its hash is not published; it will be recorded"
        )
        command = f"curl -fL --create-dirs -o {_shown_home()}/{self.file} {self.url}"
        places = " or ".join((f"${HOME_VARIABLE}", HOME, *self.places))
        return f"Get {self.url} ({', '.join(facts)}), put it in {places}, for example: {command}"


@dataclass(frozen=True)
class Snapshot:
    """A folder of files out of one repository of the Hugging Face Hub.

    Attributes:
        repo: owner/name; the folder is called by the name.
        files: what has to be in it.
        revision: branch or commit to fetch.
        sha256: known hashes by file; the other files' hashes are recorded all the same.
        path: the folder itself, if configured.
        how: the remedy, for one that is not fetched with all others.
    """

    repo: str
    files: tuple[str, ...]
    revision: str = "main"
    sha256: tuple[tuple[str, str], ...] = ()
    path: str | None = None
    how: str = ""

    @property
    def file(self) -> str:
        """The folder's name."""
        return self.repo.rpartition("/")[2]

    @property
    def home(self) -> Path:
        """Path of the fetched folder, in $KVBENCH_WEIGHTS if it is set, else in ~/.cache/kvbench/weights."""
        return _homes()[0] / self.file

    @property
    def pinned(self) -> bool:
        """Whether its content is known beforehand: by a commit, or by the hash of every file."""
        is_commit = len(self.revision) == 40 and set(self.revision) <= set("0123456789abcdef")
        return is_commit or set(self.files) <= set(dict(self.sha256))

    def find(self) -> Path | None:
        """The configured folder, else one in $KVBENCH_WEIGHTS, ours or the Hub's cache; None unless complete."""
        whole = (path for path in self.candidates if all((path / file).is_file() for file in self.files))
        return next(whole, None)

    def require(self) -> tuple[Path, dict[str, str]]:
        """The folder and the SHA-256 of every file, by repository and name.

        Raises:
            WeightError: a file is missing, or its hash is not the expected one.
        """
        folder = self.find()
        if folder is None:
            raise WeightError(self.remedy())
        hashes = {}
        for file in self.files:
            part = Weight(f"{self.repo}/{file}", sha256=dict(self.sha256).get(file), path=str(folder / file))
            hashes[part.file] = part.require()[1]
        return folder, hashes

    def remedy(self) -> str:
        """Return the remedy if it is missing, in one line; names the files that a configured folder lacks."""
        if self.path is None:
            return _remedy(self.file, None, self.how)
        folder = resolve_path(self.path)
        lacking = [file for file in self.files if not (folder / file).is_file()]
        return _remedy(self.file, f"{self.path} (files: {', '.join(lacking)})", self.how)

    def directions(self) -> str:
        """Return how to get it by hand: repository, revision, files, places and command; `how` if it has one."""
        if self.how:
            return self.how
        moving = "" if self.pinned else "; no commit of it is known here, so hashes are recorded"
        return (
            f"Get https://huggingface.co/{self.repo} ({self.revision}{moving}), put it in "
            f"${HOME_VARIABLE}/{self.file} or {HOME}/{self.file}, for example: hf download {self.repo} "
            f"--revision {self.revision} --local-dir {_shown_home()}/{self.file} {' '.join(self.files)}"
        )

    def url(self, file: str) -> str:
        """Address of one of its files."""
        return f"https://huggingface.co/{self.repo}/resolve/{self.revision}/{file}"

    @property
    def candidates(self) -> list[Path]:
        """Every folder at which it is looked for, best first."""
        if self.path is not None:
            return [resolve_path(self.path)]
        own = [folder / self.file for folder in _homes()]
        for cache in HUB_CACHES:
            root = resolve_path(cache) / f"models--{self.repo.replace('/', '--')}"
            branch = root / "refs" / self.revision
            commit = branch.read_text(encoding="utf-8").strip() if branch.is_file() else self.revision
            own.append(root / "snapshots" / commit)
        return own


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, remembered for as long as its size and modification time stay."""
    status = path.stat()
    return _hash(path, status.st_size, status.st_mtime_ns)


@lru_cache
def _hash(path: Path, size: int, modified: int) -> str:  # noqa: ARG001 - size and time are part of the key
    return hash_path(path)


def _homes() -> list[Path]:
    """Return our own folders, the one first into which files are fetched."""
    named = os.environ.get(HOME_VARIABLE)
    return [resolve_path(folder) for folder in (*([named] if named else []), HOME)]


def _shown_home() -> str:
    return f"${HOME_VARIABLE}" if os.environ.get(HOME_VARIABLE) else HOME


def _remedy(file: str, path: str | None, how: str = "") -> str:
    if path is not None:
        how = how or f"Correct the setting that names it, or leave that null and get {file} with: {FETCH}"
    return f"weights missing: {path or file}. {how or f'Get it with: {FETCH}'}"
