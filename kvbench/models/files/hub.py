"""Files of models on the Hugging Face Hub: the files that a source needs, their size, and their download.

The first download resolves a branch or tag to a commit and records it, with the names of the files, in the weights
cache. Later runs need no network, and all nodes with a shared home read the same commit.

`huggingface_hub` discards an interrupted download, because some file systems do not show whether another process writes
to the same file. Here `fetch` holds a claim, so each file in Git LFS has one partial file. After a resumed download its
SHA-256, which is its name in the cache, is compared.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Event
from urllib.error import HTTPError

from kvbench.core.claims import claim
from kvbench.core.config import UserError
from kvbench.core.files import count_free_bytes, hash_path, hash_values, parse_json, read_text, write_whole
from kvbench.core.receive import receive
from kvbench.models.files.stored import choose_files, find_home

log = logging.getLogger(__name__)

MAX_STREAMS = 4
"""Maximum number of concurrent downloads."""
CONDITIONS = "{repo}: accept its conditions on its page, then `hf auth login`"
"""Message about a gated repository, whose files may be listed but not downloaded."""


class HubError(UserError, RuntimeError):
    """Files cannot be obtained from the Hub; the message says why and what to do."""


@dataclass(frozen=True)
class RepoPart:
    """Files of a repository that a source reads.

    Attributes:
        repo: owner/name.
        revision: branch, tag or commit.
        file: file or folder inside; None for the files at the top.
    """

    repo: str
    revision: str
    file: str | None

    @property
    def record(self) -> Path:
        """File that records a complete download."""
        return find_home() / "hub" / f"{hash_values(asdict(self))[:32]}.json"

    def __str__(self) -> str:
        return f"{self.file or 'the files'} of {self.repo}"


@dataclass(frozen=True)
class RepoSnapshot:
    """Files of a repository's part at a commit.

    Attributes:
        part: part of the repository.
        commit: commit of the revision.
        sizes: bytes by name.
        folder: snapshot in the Hub's cache.
        hashes: SHA-256 by name of files in Git LFS; empty if the part is listed without network.
    """

    part: RepoPart
    commit: str
    sizes: dict[str, int]
    folder: Path
    hashes: dict[str, str] = field(default_factory=dict)

    @property
    def missing(self) -> dict[str, int]:
        """Files that are not in the cache, with the bytes that remain to be downloaded."""
        return {
            name: size - self._count_received(name)
            for name, size in self.sizes.items()
            if not (self.folder / name).is_file()
        }

    def find_blob(self, name: str) -> Path:
        """Return the path of a file in Git LFS in the Hub's cache."""
        return self.folder.parents[1] / "blobs" / self.hashes[name]

    def find_partial(self, name: str) -> Path:
        """Return the path of the partial download of a file in Git LFS."""
        return self.find_blob(name).with_name(f"{self.hashes[name]}.kvbench.incomplete")

    def _count_received(self, name: str) -> int:
        """Return the bytes of a file that need not be downloaded again."""
        if name not in self.hashes:
            return 0
        if self.find_blob(name).is_file():
            return self.sizes[name]
        partial = self.find_partial(name)
        size = partial.stat().st_size if partial.is_file() else 0
        return size if size <= self.sizes[name] else 0

    def download(self, names: Sequence[str]) -> None:
        """Download files in Git LFS concurrently; after an error or Ctrl-C all stop and keep their partial files.

        Raises:
            OSError: a download is incomplete or damaged.
        """
        stop = Event()
        with ThreadPoolExecutor(MAX_STREAMS) as pool:
            try:
                for done in as_completed([pool.submit(self._download, name, stop) for name in names]):
                    done.result()
            except BaseException:
                stop.set()
                pool.shutdown(cancel_futures=True)
                raise

    def _download(self, name: str, stop: Event) -> None:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        blob, partial = self.find_blob(name), self.find_partial(name)
        if blob.is_file():
            return
        blob.parent.mkdir(parents=True, exist_ok=True)
        if not (start := self._count_received(name)):
            partial.unlink(missing_ok=True)  # it belongs to a file of a different size
        url = hf_hub_url(self.part.repo, name, revision=self.commit)
        receive(url, partial, name, headers=build_hf_headers(), size=self.sizes[name], stop=stop)
        if start and hash_path(partial) != self.hashes[name]:
            partial.unlink()
            raise OSError(f"{name} was damaged and has been deleted")
        partial.replace(blob)

    @property
    def path(self) -> Path:
        """Local file or folder of the part."""
        return self.folder / (self.part.file or "")


def find_fetched(part: RepoPart) -> RepoSnapshot | None:
    """Return the snapshot of a downloaded part, without network access; None unless every file exists."""
    snapshot = _read_record(part)
    return None if snapshot is None or snapshot.missing else snapshot


def list_part(part: RepoPart) -> RepoSnapshot:
    """Query the Hub for the files of a part and their sizes; a resolved revision keeps its commit.

    Raises:
        HubError: the Hub cannot be reached, or has no such repository, revision or file.
    """
    try:
        from huggingface_hub import HfApi, constants
        from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled
    except ImportError:
        raise HubError(f"install the `text` extra to download {part.repo}") from None
    cache = Path(constants.HF_HUB_CACHE, f"models--{part.repo.replace('/', '--')}")
    known = _read_record(part)
    try:
        info = HfApi().model_info(
            part.repo, revision=known.commit if known else part.revision, files_metadata=True
        )
    except GatedRepoError:
        raise HubError(CONDITIONS.format(repo=part.repo)) from None
    except OfflineModeIsEnabled:
        return _list_cached(part, cache)
    except Exception as error:  # the library's transport has its own errors
        try:
            return _list_cached(part, cache)
        except HubError:
            raise HubError(f"cannot download {part} ({str(error).splitlines()[0]})") from error
    siblings = info.siblings or ()
    sizes = {file.rfilename: file.size or 0 for file in siblings}
    hashes = {file.rfilename: file.lfs.sha256 for file in siblings if file.lfs is not None}
    return _choose_files(part, str(info.sha), sizes, cache / "snapshots" / str(info.sha), hashes)


def fetch(snapshots: Sequence[RepoSnapshot]) -> None:
    """Log the size of missing files and download them; an interrupted download resumes.

    Raises:
        HubError: the disk is full, or a download fails; the same command resumes it.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError

    todo = [snapshot for snapshot in snapshots if snapshot.missing]
    _announce(todo, Path(constants.HF_HUB_CACHE))
    for snapshot in snapshots:
        part = snapshot.part
        with claim(part.record.with_suffix(".claim")):
            if snapshot.missing:
                try:
                    names = list(snapshot.missing)
                    snapshot.download([name for name in names if name in snapshot.hashes])
                    # Fetches the small files, and links the large ones into the snapshot's folder.
                    snapshot_download(part.repo, revision=snapshot.commit, allow_patterns=names)
                except Exception as error:  # the library's transport has its own errors
                    code = error.headers.get("X-Error-Code") if isinstance(error, HTTPError) else None
                    if code == "GatedRepo" or isinstance(error, GatedRepoError):
                        raise HubError(CONDITIONS.format(repo=part.repo)) from None
                    raise HubError(
                        f"the download of {part} ended early ({str(error).splitlines()[0]}); run it again to resume"
                    ) from None
            write_whole(part.record, json.dumps({**asdict(snapshot), "folder": str(snapshot.folder)}))


def format_bytes(size: int) -> str:
    """Format a number of bytes in GB or MB.

    >>> format_bytes(4_640_000_000)
    '4.6 GB'
    """
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def _announce(todo: Sequence[RepoSnapshot], cache: Path) -> None:
    needed = sum(size for snapshot in todo for size in snapshot.missing.values())
    if not needed:
        return
    log.info("%s to download to %s", format_bytes(needed), cache)
    for snapshot in todo:
        part, size = snapshot.part, format_bytes(sum(snapshot.missing.values()))
        log.info("  %s: %s at %s = commit %s", size, part, part.revision, snapshot.commit)
    if (free := count_free_bytes(cache)) < needed:
        raise HubError(
            f"{format_bytes(needed)} to download, {format_bytes(free)} free in {cache}: set HF_HOME to a larger disk"
        )


def _read_record(part: RepoPart) -> RepoSnapshot | None:
    try:
        record = parse_json(read_text(part.record))
        return RepoSnapshot(part, record["commit"], record["sizes"], Path(record["folder"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _list_cached(part: RepoPart, cache: Path) -> RepoSnapshot:
    """Return the snapshot of a part in the Hub's own cache, which other programs may have filled."""
    branch = cache / "refs" / part.revision
    commit = read_text(branch).strip() if branch.is_file() else part.revision
    folder = cache / "snapshots" / commit
    names = {
        str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()
    }
    try:
        return _choose_files(part, commit, names, folder, {})
    except HubError:
        raise HubError(
            f"HF_HUB_OFFLINE is set or there is no network, and {part} is not in {cache.parent}; "
            "run task=weights on a machine with network"
        ) from None


def _choose_files(
    part: RepoPart, commit: str, sizes: Mapping[str, int], folder: Path, hashes: Mapping[str, str]
) -> RepoSnapshot:
    """Return the snapshot of a part with the files that are read, or raise a HubError if there are none."""
    if part.file is not None and part.file in sizes:
        names = [part.file]
    else:
        prefix = "" if part.file is None else f"{part.file}/"
        inside = [name.removeprefix(prefix) for name in sizes if name.startswith(prefix)]
        names = [prefix + name for name in choose_files(inside)]
    if not names:
        raise HubError(f"{part.repo} has no {part.file or 'weights'} at {part.revision}")
    lfs = {name: hashes[name] for name in names if name in hashes}
    return RepoSnapshot(part, commit, {name: sizes[name] for name in names}, folder, lfs)
