"""A worker that stands for one of another machine: `python worker.py MACHINE STOP ARGUMENTS...`.

The folder in which it starts is for it one of a network file system, so that it sees the claims of others by their age
alone. It hangs in the middle of its batch number STOP (0 for never).

A client of NFS caches names, missing files and listings: for some seconds it does not see what other clients wrote or
removed. Opening a known file asks the server; an own change forgets what was known of the folder. Locks are refused.
"""

import builtins
import errno
import fcntl
import functools
import io
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from kvbench.cli.app import main
from kvbench.core import claims as locks
from kvbench.models.infinity.model import InfinityModel

CACHED = 1.0
"""Seconds for which it believes what it knows of a file."""
CHANGES = ("mkdir", "rename", "replace", "unlink", "remove", "rmdir", "link", "symlink")
"""Functions of `os` that change folders; the first argument is a path in each, and often the second."""


class Client:
    """What one client caches of files below a folder, for some seconds."""

    def __init__(self, root: Path, seconds: float) -> None:
        self.root, self.seconds = root.absolute(), seconds
        self.known: dict[str, dict[object, tuple[float, object]]] = {}
        self.late = 0
        """Answers that were out of the cache."""

    def find(self, path: object) -> tuple[str, str] | None:
        """Return folder and name of a path below the root; None for others."""
        if not isinstance(path, str | os.PathLike):
            return None
        whole = Path(os.fspath(path)).absolute()
        return (str(whole.parent), whole.name) if self.root in whole.parents else None

    def forget(self, path: object) -> None:
        """Forget what was known of the folder of a path."""
        if (found := self.find(path)) is not None:
            self.known.pop(found[0], None)

    def ask(self, folder: str, key: object, call: Callable[[], Any]) -> Any:
        """Return what a call returned or raised before, or call it."""
        held = self.known.setdefault(folder, {})
        if key not in held or time.monotonic() - held[key][0] > self.seconds:
            try:
                answer: object = call()
            except FileNotFoundError as error:
                answer = error
            held[key] = (time.monotonic(), answer)
        else:
            self.late += 1
        answer = held[key][1]
        if isinstance(answer, FileNotFoundError):
            raise FileNotFoundError(*answer.args[:2], answer.filename)
        return answer

    def stat(self, call: Callable[..., object], path: object, **options: object) -> object:
        """Look a name up."""
        found = None if "dir_fd" in options else self.find(path)
        if found is None:
            return call(path, **options)
        key = (found[1], options.get("follow_symlinks", True))
        return self.ask(found[0], key, functools.partial(call, path, **options))

    def list(self, call: Callable[..., Any], path: object = ".") -> object:
        """List a folder."""
        found = self.find(path)
        if found is None:
            return call(path)
        entries = self.ask(str(Path(*found)), call.__name__, lambda: [*call(path)])
        return nullcontext(entries) if call.__name__ == "scandir" else entries

    def open(
        self, call: Callable[..., object], file: object, mode: str = "r", *more: Any, **named: Any
    ) -> object:
        """Open a file: a name that is known not to be there is not asked for again, unless it is made."""
        found = self.find(file)
        if found is not None and set(mode) & set("wxa"):
            self.forget(file)
        elif found is not None:
            for links in (True, False):
                held = self.known.get(found[0], {}).get((found[1], links))
                if (
                    held
                    and isinstance(held[1], FileNotFoundError)
                    and time.monotonic() - held[0] <= self.seconds
                ):
                    self.late += 1
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(file))
        return call(file, mode, *more, **named)

    def change(self, call: Callable[..., object], *paths: object, **options: object) -> object:
        """Change folders."""
        try:
            return call(*paths, **options)
        finally:
            for path in paths[:2]:
                self.forget(path)


@contextmanager
def network_files(root: Path, seconds: float) -> Iterator[Client]:
    """Make a folder one of a network file system for this process, which caches answers for some seconds."""
    client = Client(root, seconds)
    opening = functools.partial(client.open, io.open)
    patches = [
        patch.object(os, "stat", functools.partial(client.stat, os.stat)),
        patch.object(os, "lstat", functools.partial(client.stat, os.lstat)),
        patch.object(os, "listdir", functools.partial(client.list, os.listdir)),
        patch.object(os, "scandir", functools.partial(client.list, os.scandir)),
        patch.object(io, "open", opening),
        patch.object(builtins, "open", opening),
        patch.object(fcntl, "flock", side_effect=OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))),
        *(patch.object(os, name, functools.partial(client.change, getattr(os, name))) for name in CHANGES),
    ]
    with ExitStack() as stack:
        for one in patches:
            stack.enter_context(one)
        yield client


def hang_at(stop: int, generate: Callable[..., object]) -> Callable[..., object]:
    batches = 0

    def generating(*arguments: object) -> object:
        nonlocal batches
        batches += 1
        if batches == stop:
            print("hangs", flush=True)
            time.sleep(600)
        return generate(*arguments)

    return generating


if __name__ == "__main__":
    torch.set_num_threads(1)
    _, locks.MACHINE, stop = sys.argv[:3]
    del sys.argv[1:3]
    with (
        network_files(Path.cwd(), CACHED) as client,
        patch.object(InfinityModel, "generate", hang_at(int(stop), InfinityModel.generate)),
    ):
        try:
            main()
        finally:
            print(f"{client.late} answers of the file system were late")
