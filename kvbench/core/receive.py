"""Download of one file into a partial file, which a later call continues."""

import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from threading import Event
from typing import Any
from urllib.parse import urlsplit

from kvbench.core.bars import make_bar
from kvbench.core.files import CHUNK_BYTES

TIMEOUT = 20.0
"""Seconds after which a host without an answer counts as unreachable."""
TRIES = 5
"""Maximum number of connections for one file; a lost connection, or one silent for `TIMEOUT`, is opened again."""
PAUSE = 1.0
"""Seconds before a lost connection is opened again."""


def receive(
    url: str,
    part: Path,
    title: str,
    *,
    headers: Mapping[str, str] | None = None,
    size: int | None = None,
    stop: Event | None = None,
) -> None:
    """Download a file, resuming after the bytes in `part` if the host sends ranges, with a progress bar.

    Args:
        url: http, https or file.
        part: partial file.
        title: name of the file in the progress bar.
        headers: headers of the request; `Authorization` is sent to the host of `url` only.
        size: bytes of the whole file; None for the size that the host states.
        stop: ends the download when it is set.

    Raises:
        OSError: the address cannot be read, `part` cannot be written, or the file ended early.
        InterruptedError: `stop` was set.
    """
    for left in range(TRIES - 1, -1, -1):
        start = part.stat().st_size if part.is_file() else 0
        if size is not None and start == size:
            return
        try:
            sent = {**(headers or {}), **({"Range": f"bytes={start}-"} if start else {})}
            request = urllib.request.Request(url, headers=sent)
            _receive(request, part, title, start, size, stop)
        except http.client.HTTPException as error:
            raise OSError(f"{url}: {type(error).__name__} {error}") from error
        except (ConnectionError, TimeoutError):
            if not left:
                raise
            time.sleep(PAUSE)
        else:
            return


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects; another host receives no `Authorization`."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        new = super().redirect_request(req, fp, code, msg, headers, newurl)
        if new is not None and urlsplit(newurl).netloc != urlsplit(req.full_url).netloc:
            new.remove_header("Authorization")
        return new


def _receive(
    request: urllib.request.Request, part: Path, title: str, start: int, size: int | None, stop: Event | None
) -> None:
    try:
        reply = urllib.request.build_opener(_Redirects).open(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if start and size is None and error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            return  # the file was complete already
        raise
    with reply:
        start = start if reply.status == http.client.PARTIAL_CONTENT else 0
        length = reply.headers.get("Content-Length")
        total = size if length is None else start + int(length)
        with (
            part.open("ab" if start else "wb") as file,
            make_bar(total=total, initial=start, desc=title, unit="B", unit_scale=True) as bar,
        ):
            while chunk := reply.read(CHUNK_BYTES):
                if stop is not None and stop.is_set():
                    raise InterruptedError("stopped")
                bar.update(file.write(chunk))
            file.flush()
            os.fsync(file.fileno())
    expected = total if size is None else size
    if expected is not None and (received := part.stat().st_size) != expected:
        raise OSError(f"{request.full_url}: received {received} of {expected} bytes; try again")
