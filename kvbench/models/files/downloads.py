"""Resumable downloads of large files to the Hub's cache.

`huggingface_hub` discards an interrupted download, because some file systems do not show whether another process writes
to the same file. Here `kvbench.models.files.hub.fetch` holds a claim, so each file in Git LFS has one partial file.
After a resumed download its SHA-256, which is its name in the cache, is compared.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from kvbench.core.files import hash_path
from kvbench.core.receive import receive

MAX_STREAMS = 4
"""Number of concurrent downloads."""


@dataclass(frozen=True)
class Blob:
    """A file in Git LFS.

    Attributes:
        name: name in the repository.
        url: address.
        size: number of bytes.
        sha256: hash of the contents.
        path: path in the Hub's cache.
    """

    name: str
    url: str
    size: int
    sha256: str
    path: Path

    @property
    def partial(self) -> Path:
        """File of the bytes received so far."""
        return self.path.with_name(f"{self.path.name}.kvbench.incomplete")

    @property
    def received(self) -> int:
        """Number of bytes that need not be downloaded again."""
        if self.path.is_file():
            return self.size
        size = self.partial.stat().st_size if self.partial.is_file() else 0
        return size if size <= self.size else 0


def download(blobs: Sequence[Blob]) -> None:
    """Download files concurrently; after an error or Ctrl-C all stop and keep their partial files.

    Raises:
        OSError: a download is incomplete or damaged.
    """
    stop = Event()
    with ThreadPoolExecutor(MAX_STREAMS) as pool:
        try:
            for done in as_completed([pool.submit(_download, blob, stop) for blob in blobs]):
                done.result()
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise


def _download(blob: Blob, stop: Event) -> None:
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    if blob.path.is_file():
        return
    blob.path.parent.mkdir(parents=True, exist_ok=True)
    if not (start := blob.received):
        blob.partial.unlink(missing_ok=True)  # of another size
    receive(blob.url, blob.partial, blob.name, headers=build_hf_headers(), size=blob.size, stop=stop)
    if start and hash_path(blob.partial) != blob.sha256:
        blob.partial.unlink()
        raise OSError(f"{blob.name} is damaged and is downloaded again")
    blob.partial.replace(blob.path)
