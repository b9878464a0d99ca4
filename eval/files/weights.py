"""Weight files of the evaluators: search paths, hashes, and remedies for missing files.

Libraries do not check the files in their caches, so every file is hashed before it is read.
"""

import contextlib
import os
import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.core.files import read_text, resolve_path
from kvbench.eval.files.digests import hash_files_at

HOME_VARIABLE = "KVBENCH_WEIGHTS"
HOME = "~/.cache/kvbench/weights"
"""Folder of fetched files, which is always searched."""
FETCH_COMMAND = "make weights (python -m kvbench.eval.files.fetch)"
TORCH_CACHES = ("$TORCH_HOME/hub/checkpoints", "~/.cache/torch/hub/checkpoints")
MAX_REASON = 500
"""Maximum number of characters of a library's reason."""
HUB_CACHES = ("$HF_HUB_CACHE", "$HF_HOME/hub", "~/.cache/huggingface/hub")


class WeightError(RuntimeError):
    """A weight file is missing or has another hash."""


@dataclass(frozen=True)
class Weight:
    """One weight file.

    Attributes:
        file: name of the file.
        url: address of the file.
        sha256: expected hash; None accepts any content, whose hash is recorded.
        size: number of bytes.
        places: folders of library caches, with ~ and $VARIABLES.
        how: remedy for a file without an address.
        path: configured path; `pkg://package/inside/it` is a file of a package.
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
        """Return the file at an address, named by its last part."""
        return cls(url.rpartition("/")[2], url, sha256, **more)

    def find(self) -> Path | None:
        """Return the first of `candidates` that exists, or None."""
        return next((path for path in self.candidates if path.is_file()), None)

    @property
    def candidates(self) -> list[Path]:
        """Search paths, best first: the configured one, or $KVBENCH_WEIGHTS, our folder and library caches."""
        if self.path is not None:
            return [resolve_path(self.path)]
        return [folder / self.file for folder in (*_homes(), *map(resolve_path, self.places))]

    @property
    def pinned(self) -> bool:
        """Whether the SHA-256 is known in advance."""
        return self.sha256 is not None

    def require(self) -> tuple[Path, str]:
        """Return the file and its SHA-256.

        Raises:
            WeightError: the file is missing or has another hash.
        """
        path = self.find()
        if path is None:
            raise WeightError(self.remedy())
        sha256 = file_sha256(path)
        if self.sha256 is not None and sha256 != self.sha256:
            hashes = f"sha256 {sha256}, expected {self.sha256}"
            raise WeightError(f"{path} is not {self.file}: {hashes}. {self._replacement()}")
        return path, sha256

    def remedy(self) -> str:
        """Return one line with the remedy for a missing file."""
        return _remedy(self.file, self.path, "" if self.url else self.how)

    def _replacement(self) -> str:
        """Return the remedy for a file that is another."""
        if self.path is not None:
            return "Correct the setting that names it, or fetch the file again"
        return self.how or f"Delete it and get it again with: {FETCH_COMMAND}"

    def directions(self) -> str:
        """Return instructions with address, size, hash, folders and command, or `how` without an address."""
        if not self.url:
            return self.how
        facts = [f"{self.size / 1e6:.0f} MB"] if self.size else []
        facts += [
            f"sha256 {self.sha256}" if self.sha256 else "its hash is not published; it will be recorded"
        ]
        command = f"curl -fL --create-dirs -o {_shown_home()}/{self.file} {self.url}"
        places = " or ".join((f"${HOME_VARIABLE}", HOME, *self.places))
        return f"Get {self.url} ({', '.join(facts)}), put it in {places}, for example: {command}"


@dataclass(frozen=True)
class Snapshot:
    """A folder of files from a repository of the Hugging Face Hub.

    Attributes:
        repo: owner/name; the folder has the name.
        files: required files.
        revision: branch or commit to fetch.
        sha256: known hashes by file; hashes of other files are recorded.
        path: configured path.
        how: remedy for a folder that is not fetched with the others.
    """

    repo: str
    files: tuple[str, ...]
    revision: str = "main"
    sha256: tuple[tuple[str, str], ...] = ()
    path: str | None = None
    how: str = ""

    @property
    def file(self) -> str:
        """Name of the folder: the repository's name without its owner."""
        return self.repo.rpartition("/")[2]

    @property
    def pinned(self) -> bool:
        """Whether a commit or the hashes of all files are known in advance."""
        is_commit = len(self.revision) == 40 and set(self.revision) <= set("0123456789abcdef")
        return is_commit or set(self.files) <= set(dict(self.sha256))

    def find(self) -> Path | None:
        """Return the first of `candidates` that has all files, or None."""
        complete = (path for path in self.candidates if all((path / file).is_file() for file in self.files))
        return next(complete, None)

    def require(self) -> tuple[Path, dict[str, str]]:
        """Return the folder and the SHA-256 of each file, by repository and name.

        Raises:
            WeightError: a file is missing or has another hash.
        """
        folder = self.find()
        if folder is None:
            raise WeightError(self.remedy())
        hashes = {}
        for file in self.files:
            weight = Weight(
                f"{self.repo}/{file}", sha256=dict(self.sha256).get(file), path=str(folder / file)
            )
            hashes[weight.file] = weight.require()[1]
        return folder, hashes

    def remedy(self) -> str:
        """Return one line with the remedy, which names the files that are missing in a configured folder."""
        if self.path is None:
            return _remedy(self.file, None, self.how)
        folder = resolve_path(self.path)
        missing = [file for file in self.files if not (folder / file).is_file()]
        return _remedy(self.file, f"{self.path} (files: {', '.join(missing)})", self.how)

    def directions(self) -> str:
        """Return instructions with repository, revision, files, folders and command, or `how`."""
        if self.how:
            return self.how
        moving = "" if self.pinned else "; no commit of it is known here, so hashes are recorded"
        return (
            f"Get https://huggingface.co/{self.repo} ({self.revision}{moving}), put it in "
            f"${HOME_VARIABLE}/{self.file} or {HOME}/{self.file}, for example: hf download {self.repo} "
            f"--revision {self.revision} --local-dir {_shown_home()}/{self.file} {' '.join(self.files)}"
        )

    def url(self, file: str) -> str:
        """Return the address of a file of the repository."""
        return f"https://huggingface.co/{self.repo}/resolve/{self.revision}/{file}"

    @property
    def candidates(self) -> list[Path]:
        """Search paths, best first: the configured one, or $KVBENCH_WEIGHTS, our folder and the Hub's caches."""
        if self.path is not None:
            return [resolve_path(self.path)]
        own = [folder / self.file for folder in _homes()]
        for cache in HUB_CACHES:
            root = resolve_path(cache) / f"models--{self.repo.replace('/', '--')}"
            branch = root / "refs" / self.revision
            commit = read_text(branch).strip() if branch.is_file() else self.revision
            own.append(root / "snapshots" / commit)
        return own


def find_wrong(weights: Iterable[Weight | Snapshot]) -> list[str]:
    """Return a line for each file whose SHA-256 is not the known one; missing files are left out."""
    lines = []
    for one in weights:
        if one.find() is not None and one.sha256:
            try:
                one.require()
            except WeightError as error:
                lines.append(str(error))
    return lines


@contextlib.contextmanager
def loading(weights: Iterable[Weight | Snapshot]) -> Iterator[None]:
    """Turn errors of a network that is loaded into one line, if a file without a known hash may be the cause.

    Raises:
        WeightError: names these files and their hashes.
    """
    try:
        yield
    except (WeightError, ImportError, MemoryError):
        raise
    except Exception as error:
        files = [file for one in weights if not one.sha256 for file in _list_found(one)]
        if not files or type(error).__name__ == "OutOfMemoryError":
            raise
        unsafe = isinstance(error, pickle.UnpicklingError)  # torch's message recommends unsafe loading
        reason = "it is damaged or holds more than tensors" if unsafe else _first_line(error)
        names = " or ".join(f"{file} (sha256 {file_sha256(file)})" for file in files)
        raise WeightError(
            f"{names} cannot be used: {reason}. Fetch it again, or correct the setting that names it"
        ) from error


def _list_found(one: Weight | Snapshot) -> list[Path]:
    path = one.find()
    if path is None:
        return []
    return [path] if isinstance(one, Weight) else [path / name for name in one.files]


def _first_line(error: Exception) -> str:
    """Return the beginning of an error's message; errors of this package are `ValueError`s that say all."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kind = "" if type(error) is ValueError else f"{type(error).__name__} "
    return f"{kind}{' '.join(lines[:2])}"[:MAX_REASON]


def fetched_path(weight: Weight | Snapshot) -> Path:
    """Return the path of a fetched file or folder, in $KVBENCH_WEIGHTS if it is set, else in our folder."""
    return _homes()[0] / weight.file


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, which is read again only if it changed; see `hash_files_at`."""
    return hash_files_at(path)[path.name]


def _homes() -> list[Path]:
    """Return our folders; files are fetched into the first one."""
    named = os.environ.get(HOME_VARIABLE)
    return [resolve_path(folder) for folder in (*([named] if named else []), HOME)]


def _shown_home() -> str:
    return f"${HOME_VARIABLE}" if os.environ.get(HOME_VARIABLE) else HOME


def _remedy(file: str, path: str | None, how: str = "") -> str:
    if path is not None:
        how = (
            how
            or f"Correct the setting that names it, or leave that null and get {file} with: {FETCH_COMMAND}"
        )
    return f"weights missing: {path or file}. {how or f'Get it with: {FETCH_COMMAND}'}"
