"""Downloads of large files to the Hub's cache that resume where an interrupted one ended.

`huggingface_hub` drops what an interrupted download has received: not every file system tells whether another process
writes to the same file. Here a claim is held (`kvbench.models.files.hub.fetch`), so files in Git LFS are received into
one partial file each. Their SHA-256, which names them in the cache, is compared after a resumed download.
"""

import io
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from kvbench.core.files import hash_path

STREAMS = 4
"""Files that are downloaded at a time."""


@dataclass(frozen=True)
class Blob:
    """A file in Git LFS.

    Attributes:
        name: of the file in its repository.
        url: its address.
        size: bytes.
        sha256: of its contents.
        path: its place in the Hub's cache.
    """

    name: str
    url: str
    size: int
    sha256: str
    path: Path

    @property
    def partial(self) -> Path:
        """File that holds what was received so far."""
        return self.path.with_name(f"{self.path.name}.kvbench.incomplete")

    @property
    def received(self) -> int:
        """Bytes that need not be downloaded again."""
        if self.path.is_file():
            return self.size
        found = self.partial.stat().st_size if self.partial.is_file() else 0
        return found if found <= self.size else 0


def download(blobs: Sequence[Blob]) -> None:
    """Download what is missing of files, several at a time; after an error or Ctrl-C all stop and keep their parts.

    Raises:
        OSError: a download ended early, or its contents are not those of the Hub.
    """
    stop = Event()
    with ThreadPoolExecutor(STREAMS) as pool:
        try:
            for done in as_completed([pool.submit(_download, blob, stop) for blob in blobs]):
                done.result()
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise


class _Partial(io.BufferedWriter):
    """File that refuses to grow once its download is to stop."""

    def __init__(self, path: Path, mode: str, stop: Event) -> None:
        super().__init__(io.FileIO(path, mode))
        self._stop = stop

    def write(self, data: bytes) -> int:  # type: ignore[override]
        if self._stop.is_set():
            raise InterruptedError("stopped")
        return super().write(data)


def _download(blob: Blob, stop: Event) -> None:
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    if blob.path.is_file():
        return
    blob.path.parent.mkdir(parents=True, exist_ok=True)
    begun = blob.received
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}  # bytes are counted as they are stored
    with _Partial(blob.partial, "a" if begun else "w", stop) as file:
        http_get(
            blob.url,
            file,
            resume_size=begun,
            headers=headers,
            expected_size=blob.size,
            displayed_filename=blob.name,
        )
        file.flush()
        os.fsync(file.fileno())
    if begun and hash_path(blob.partial) != blob.sha256:
        blob.partial.unlink()
        raise OSError(f"{blob.name} is damaged and is downloaded again")
    blob.partial.replace(blob.path)
