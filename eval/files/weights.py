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
"""Folder of fetched files, which is searched after $KVBENCH_WEIGHTS."""
FETCH_COMMAND = "make weights (python -m kvbench.eval.files.fetch)"
TORCH_CACHES = ("$TORCH_HOME/hub/checkpoints", "~/.cache/torch/hub/checkpoints")
MAX_REASON = 500
"""Maximum number of characters of a library's error in a message."""
HUB_CACHES = ("$HF_HUB_CACHE", "$HF_HOME/hub", "~/.cache/huggingface/hub")


class WeightError(RuntimeError):
    """Weights are missing, unreadable or not the expected ones."""


@dataclass(frozen=True)
class Weight:
    """One weight file.

    Attributes:
        file: name of the file.
        url: address of the file; empty if it cannot be fetched.
        sha256: expected hash; None accepts any content, whose hash is recorded.
        size: number of bytes; None if unknown.
        caches: folders of library caches, with ~ and $VARIABLES.
        how: remedy for a file without an address.
        path: configured path; `pkg://package/inside/it` is a file of a package. None searches `candidates`.
    """

    file: str
    url: str = ""
    sha256: str | None = None
    size: int | None = None
    caches: tuple[str, ...] = ()
    how: str = ""
    path: str | None = None

    @classmethod
    def at(cls, url: str, sha256: str | None = None, **more: Any) -> "Weight":
        """Return the file at an address, named by the last part of the address."""
        return cls(url.rpartition("/")[2], url, sha256, **more)

    def find(self) -> Path | None:
        """Return the first of `candidates` that exists, or None."""
        return next((path for path in self.candidates if path.is_file()), None)

    @property
    def candidates(self) -> list[Path]:
        """Search paths, best first: `path`, or else $KVBENCH_WEIGHTS, `HOME` and library caches."""
        if self.path is not None:
            return [resolve_path(self.path)]
        return [folder / self.file for folder in (*_homes(), *map(resolve_path, self.caches))]

    @property
    def pinned(self) -> bool:
        """Whether the SHA-256 is known in advance."""
        return self.sha256 is not None

    def require(self) -> tuple[Path, str]:
        """Return the file and its SHA-256; raise WeightError if the file is missing or its hash differs."""
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
        """Return the remedy for a wrong file."""
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
        folders = " or ".join((f"${HOME_VARIABLE}", HOME, *self.caches))
        return f"Get {self.url} ({', '.join(facts)}), put it in {folders}, for example: {command}"


@dataclass(frozen=True)
class Snapshot:
    """A folder of files from a repository of the Hugging Face Hub.

    Attributes:
        repo: owner/name; the folder is called `name`.
        files: required files.
        revision: branch or commit to fetch.
        sha256: known hashes by file; hashes of other files are recorded.
        path: configured path; None searches `candidates`.
        how: remedy for a folder that cannot be fetched; empty if it can.
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
        """Return the folder and each file's SHA-256 by `<repo>/<file>`; raise WeightError like `Weight.require`."""
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
        """Return one line with the remedy, which names the missing files of a configured folder."""
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
        """Search paths, best first: `path`, or else $KVBENCH_WEIGHTS, `HOME` and the Hub's caches."""
        if self.path is not None:
            return [resolve_path(self.path)]
        paths = [folder / self.file for folder in _homes()]
        for cache in HUB_CACHES:
            root = resolve_path(cache) / f"models--{self.repo.replace('/', '--')}"
            branch = root / "refs" / self.revision
            commit = read_text(branch).strip() if branch.is_file() else self.revision
            paths.append(root / "snapshots" / commit)
        return paths


def find_wrong(weights: Iterable[Weight | Snapshot]) -> list[str]:
    """Return a line for each file whose SHA-256 differs from the known one; missing files are left out."""
    lines = []
    for weight in weights:
        if weight.find() is not None and weight.sha256:
            try:
                weight.require()
            except WeightError as error:
                lines.append(str(error))
    return lines


@contextlib.contextmanager
def loading(weights: Iterable[Weight | Snapshot]) -> Iterator[None]:
    """Turn errors of loading a network into a WeightError that names its files without a known hash, if there are any.

    MemoryError, ImportError and torch's OutOfMemoryError pass.
    """
    try:
        yield
    except (WeightError, ImportError, MemoryError):
        raise
    except Exception as error:
        files = [file for weight in weights if not weight.sha256 for file in _list_found(weight)]
        if not files or type(error).__name__ == "OutOfMemoryError":
            raise
        unsafe = isinstance(error, pickle.UnpicklingError)  # torch's message recommends unsafe loading
        reason = "it is damaged or holds more than tensors" if unsafe else _first_line(error)
        names = " or ".join(f"{file} (sha256 {file_sha256(file)})" for file in files)
        raise WeightError(
            f"{names} cannot be used: {reason}. Fetch it again, or correct the setting that names it"
        ) from error


def _list_found(weight: Weight | Snapshot) -> list[Path]:
    path = weight.find()
    if path is None:
        return []
    return [path] if isinstance(weight, Weight) else [path / name for name in weight.files]


def _first_line(error: Exception) -> str:
    """Return the beginning of an error's message, after its type unless it is a `ValueError`, as of this package."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kind = "" if type(error) is ValueError else f"{type(error).__name__} "
    return f"{kind}{' '.join(lines[:2])}"[:MAX_REASON]


def fetched_path(weight: Weight | Snapshot) -> Path:
    """Return the path of a fetched file or folder, in $KVBENCH_WEIGHTS if it is set, else in `HOME`."""
    return _homes()[0] / weight.file


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, which is cached while the file is unchanged; see `hash_files_at`."""
    return hash_files_at(path)[path.name]


def _homes() -> list[Path]:
    """Return the folders of fetched files; files are fetched into the first folder."""
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
