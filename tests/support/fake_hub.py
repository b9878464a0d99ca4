"""Stands for the Hugging Face Hub in tests: repositories in memory, at one commit, and a count of what is asked."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
from huggingface_hub import constants

COMMIT = "0123456789" * 4


class FakeHub:
    """What `huggingface_hub` does of the Hub, for the calls that models make.

    Args:
        repos: contents by repository and file.
        monkeypatch: puts it in the library's place.
        cache: folder of the library's cache.

    Attributes:
        online: whether the network is there.
        breaks_at: a file whose download fails.
        asked: repositories and revisions that were listed.
        sent: files that were downloaded.
    """

    def __init__(self, repos: Mapping[str, Mapping[str, bytes]], monkeypatch: Any, cache: Path) -> None:
        self.repos, self.cache, self.online = repos, cache, True
        self.breaks_at: str | None = None
        self.asked: list[tuple[str, str]] = []
        self.sent: list[str] = []
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: self)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.snapshot_download)

    def model_info(self, repo: str, *, revision: str, files_metadata: bool) -> Any:
        self.asked.append((repo, revision))
        if not self.online:
            raise ConnectionError("no network")
        if repo not in self.repos or revision not in ("main", "v1", COMMIT):
            raise OSError(f"404: {repo} at {revision}")
        assert files_metadata
        files = [SimpleNamespace(rfilename=k, size=len(v)) for k, v in self.repos[repo].items()]
        return SimpleNamespace(sha=COMMIT, siblings=files)

    def snapshot_download(self, repo: str, *, revision: str, allow_patterns: Sequence[str]) -> str:
        folder = self.cache / f"models--{repo.replace('/', '--')}" / "snapshots" / revision
        for name in sorted(allow_patterns):
            if name == self.breaks_at:
                raise ConnectionError("reset by peer")
            self.sent.append(name)
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(self.repos[repo][name])
        return str(folder)
