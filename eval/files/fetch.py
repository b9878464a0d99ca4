"""Command that finds or downloads the files that evaluators need: python -m kvbench.eval.files.fetch.

A file appears complete and with the expected hash, or not at all.
"""

import argparse
import http.client
import importlib
import os
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from tqdm import tqdm

from kvbench.core.files import CHUNK, hash_path
from kvbench.eval.files.weights import Snapshot, Weight, WeightError

TIMEOUT = 20.0
"""Seconds without an answer after which a host counts as unreachable."""

State = Literal["found", "fetched", "missing", "unreachable", "by hand", "wrong"]


@dataclass(frozen=True)
class Report:
    """Outcome for one file or folder.

    Attributes:
        name: its name.
        state: found (with the expected hash, if one is known), fetched, missing (nothing was downloaded), unreachable,
            by hand (it has no address), wrong (another hash).
        detail: where it is, or what to do.
    """

    name: str
    state: State
    detail: str


def catalogue() -> list[Weight | Snapshot]:
    """Every file and folder that a module of `kvbench.eval` names, by name."""
    found: dict[str, Weight | Snapshot] = {}
    here = Path(__file__).resolve().parent.parent  # its folders are no packages: pkgutil does not enter them
    for path in sorted(here.glob("*/*.py")):
        for value in vars(importlib.import_module(f"kvbench.eval.{path.parent.name}.{path.stem}")).values():
            if isinstance(value, Weight | Snapshot):
                found[value.file] = value
    return [found[name] for name in sorted(found)]


def fetch(wanted: Sequence[Weight | Snapshot], *, download: bool = True) -> list[Report]:
    """Find every file and download the missing ones; a host that does not answer is asked once."""
    silent: dict[str, str] = {}
    return [_fetch(one, silent, download=download) for one in wanted]


def download_file(url: str, target: Path, sha256: str | None = None) -> None:
    """Download one file, complete or not at all.

    An interrupted download resumes if the hash is known, which shows whether the parts belong together; otherwise it
    starts again.

    Args:
        url: http, https or file.
        target: where it goes.
        sha256: its hash; None accepts any content.

    Raises:
        OSError: the address cannot be read, or the target not be written.
        WeightError: it ended early, or the hash is another.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.part")
    if sha256 is None:
        part.unlink(missing_ok=True)
    start = part.stat().st_size if part.is_file() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={start}-"} if start else {})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as reply:
            resumed = reply.status == http.client.PARTIAL_CONTENT
            _receive(reply, part, start if resumed else 0, target.name)
    except urllib.error.HTTPError as error:
        if (
            not start or error.code != http.client.REQUESTED_RANGE_NOT_SATISFIABLE
        ):  # else nothing is left to send
            raise
    except http.client.HTTPException as error:
        raise OSError(f"{url}: {type(error).__name__} {error}") from error
    if sha256 is not None and (found := hash_path(part)) != sha256:
        part.unlink()
        raise WeightError(f"{url} is not the expected file: sha256 {found}, expected {sha256}")
    part.replace(target)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return 1 if a file has another hash than expected, else 0."""
    parser = argparse.ArgumentParser(prog="python -m kvbench.eval.files.fetch", description=__doc__)
    parser.add_argument("names", nargs="*", help="files or folders, all by default")
    parser.add_argument("--list", action="store_true", help="download nothing")
    options = parser.parse_args(arguments)
    known = {one.file: one for one in catalogue()}
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"{unknown[0]}: no such weights; there are {', '.join(known)}")
    reports = fetch([known[name] for name in options.names or known], download=not options.list)
    width = max(len(report.name) for report in reports)
    there = ("found", "fetched")
    for report in reports:
        print(
            f"{report.state:<12}{report.name:<{width}}  {report.detail if report.state in there else ''}".rstrip()
        )
    for report in reports:
        if report.state not in there:
            print(f"\n{report.name}: {report.detail}")
    return int(any(report.state == "wrong" for report in reports))


def _fetch(one: Weight | Snapshot, silent: dict[str, str], *, download: bool) -> Report:
    if (path := one.find()) is not None:
        try:
            one.require()
        except WeightError as error:
            return Report(one.file, "wrong", str(error))
        return Report(one.file, "found", str(path))
    addresses = _addresses(one)
    if not download or not addresses:
        return Report(one.file, "missing" if addresses else "by hand", one.directions())
    try:
        for url, target, sha256 in addresses:
            host = urlsplit(url).netloc
            if host in silent:
                raise OSError(silent[host])
            if not target.is_file():
                download_file(url, target, sha256)
        one.require()
    except urllib.error.HTTPError as error:
        return Report(one.file, "unreachable", f"{url}: {error}. {one.directions()}")
    except (urllib.error.URLError, TimeoutError) as error:
        silent[host] = f"{host} cannot be reached ({getattr(error, 'reason', error)})"
        return Report(one.file, "unreachable", f"{silent[host]}. {one.directions()}")
    except (OSError, WeightError) as error:
        return Report(one.file, "unreachable", f"{error}. {one.directions()}")
    note = "" if one.pinned else " (may change at its source: results record its hash)"
    return Report(one.file, "fetched", f"{one.home}{note}")


def _addresses(one: Weight | Snapshot) -> list[tuple[str, Path, str | None]]:
    """Return address, target and hash of each file."""
    if isinstance(one, Snapshot):
        if one.how:
            return []
        hashes = dict(one.sha256)
        return [(one.url(file), one.home / file, hashes.get(file)) for file in one.files]
    return [(one.url, one.home, one.sha256)] if one.url else []


def _receive(reply: Any, part: Path, start: int, title: str) -> None:
    """Write the content of a reply into a file from position `start` on, behind a progress bar."""
    length = reply.headers.get("Content-Length")
    total = None if length is None else start + int(length)
    bar = tqdm.wrapattr(reply, "read", total=total, initial=start, desc=title, leave=False)
    with part.open("ab" if start else "wb") as file, bar as read:
        shutil.copyfileobj(read, file, CHUNK)
        file.flush()
        os.fsync(file.fileno())
    if total is not None and part.stat().st_size != total:
        raise WeightError(f"{reply.url} ended after {part.stat().st_size} of {total} bytes; try again")


if __name__ == "__main__":
    sys.exit(main())
