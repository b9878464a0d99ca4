"""Semantics of a network file system, put between this process and a local folder.

A client of NFS caches names, missing files and listings: for some seconds it does not see what other clients wrote or
removed. Opening a known file asks the server; an own change forgets what was known of the folder. Locks are refused.
"""

import builtins
import errno
import fcntl
import functools
import io
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

CHANGES = ("mkdir", "rename", "replace", "unlink", "remove", "rmdir", "link", "symlink")
"""Functions of `os` that change folders; the first argument is a path in each, and often the second."""


class Listing(list[Any]):
    """Entries of a folder, used as `os.scandir` is."""

    def __enter__(self) -> "Listing":
        return self

    def __exit__(self, *raised: object) -> None:
        pass

    def close(self) -> None:
        """Do nothing."""


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
        return Listing(self.ask(str(Path(*found)), call.__name__, lambda: list(call(path))))

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


def refuse_lock(*_: object) -> None:
    """Raise what a file system without locks does."""
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


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
        patch.object(fcntl, "flock", refuse_lock),
        *(patch.object(os, name, functools.partial(client.change, getattr(os, name))) for name in CHANGES),
    ]
    for one in patches:
        one.start()
    try:
        yield client
    finally:
        for one in reversed(patches):
            one.stop()
