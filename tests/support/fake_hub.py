"""Stands for the Hugging Face Hub in tests: a web server of repositories in memory, at one commit, counting bytes."""

import hashlib
import json
import re
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

from huggingface_hub import constants, file_download
from huggingface_hub.utils import close_session

COMMIT = "0123456789" * 4
LARGE = (".pth", ".bin", ".safetensors")
"""Endings of files in Git LFS."""
NOWHERE = "http://127.0.0.1:9"
"""Address where nobody answers."""


class FakeHub:
    """A Hub that `huggingface_hub` downloads from: contents by repository and file, which `cache` receives.

    A download of `breaks_at` ends in the middle; without `ranges` no file is served in parts; `gated` is the status in
    which files are refused. `asked` has the listed repositories and revisions, `sent` the downloaded files with the
    number of bytes sent.
    """

    def __init__(self, repos: Mapping[str, Mapping[str, bytes]], monkeypatch: Any, cache: Path) -> None:
        self.repos, self.cache, self.ranges = repos, cache, True
        self.breaks_at: str | None = None
        self.gated: int | None = None
        self.asked: list[tuple[str, str]] = []
        self.sent: list[tuple[str, int]] = []
        self._monkeypatch = monkeypatch
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(
            file_download, "time", SimpleNamespace(sleep=lambda _: None)
        )  # before it tries again
        self.online = True

    @property
    def online(self) -> bool:
        return bool(constants.ENDPOINT != NOWHERE)

    @online.setter
    def online(self, there: bool) -> None:
        close_session()
        address = f"http://127.0.0.1:{self._server.server_port}" if there else NOWHERE
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        self._monkeypatch.setattr(constants, "ENDPOINT", address)
        self._monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)

    @property
    def names(self) -> list[str]:
        """Files that were downloaded, sorted."""
        return sorted(name for name, _ in self.sent)

    def close(self) -> None:
        close_session()
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing."""

    def _serve(self) -> None:
        path = self.path.partition("?")[0]
        if listed := re.fullmatch(r"/api/models/(\w+/\w+)/(revision|tree)/(\w+)", path):
            self._list(*listed.groups())
        elif self.hub.gated is not None:
            self._answer(self.hub.gated, b"", {"X-Error-Code": "GatedRepo"})
        elif found := re.fullmatch(r"/(\w+/\w+)/resolve/(\w+)/(.+)", path):
            self._send(found[3], self.hub.repos[found[1]][found[3]])
        else:
            self._answer(404, b"{}")

    def _list(self, repo: str, kind: str, revision: str) -> None:
        if kind == "revision":
            self.hub.asked.append((repo, revision))
        if repo not in self.hub.repos or revision not in ("main", "v1", COMMIT):
            self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            return
        files = []
        for name, content in self.hub.repos[repo].items():
            about = {"rfilename": name, "type": "file", "path": name, "size": len(content)}
            about |= {"blobId": "0" * 40, "oid": "0" * 40}
            if name.endswith(LARGE):
                digest = hashlib.sha256(content).hexdigest()
                about["lfs"] = {"size": len(content), "sha256": digest, "oid": digest, "pointerSize": 9}
            files.append(about)
        listing = {"id": repo, "sha": COMMIT, "siblings": files} if kind == "revision" else files
        self._answer(200, json.dumps(listing).encode())

    def _send(self, name: str, content: bytes) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        start = int(asked[1]) if asked and self.hub.ranges else 0
        broken = name == self.hub.breaks_at and self.command == "GET"
        if broken and start:  # the connection broke before, and stays broken
            self._answer(403, b"")
            return
        about = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
        about |= {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"} if start else {}
        body = content[start:]
        sent = body[: len(body) // 2] if broken else body
        if self.command == "GET":
            self.hub.sent.append((name, len(sent)))
        self._answer(206 if start else 200, sent, about, len(body))
        if broken:
            self.close_connection = True

    def _answer(
        self, status: int, body: bytes, headers: Mapping[str, str] | None = None, length: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
