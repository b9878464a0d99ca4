"""Command that finds or downloads the files of evaluators: python -m kvbench.eval.files.fetch.

A file appears complete and with the expected hash, or not at all.
"""

import argparse
import importlib
import sys
import urllib.error
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from kvbench.core.files import hash_path
from kvbench.core.receive import receive
from kvbench.eval.files.weights import Snapshot, Weight, WeightError, fetched_path

State = Literal["found", "fetched", "missing", "unreachable", "by hand", "wrong"]


@dataclass(frozen=True)
class Report:
    """Outcome for one file or folder.

    Attributes:
        name: name of the file or folder.
        state: found (with the expected hash, if known), fetched, missing (not downloaded), unreachable, by hand (no
            address) or wrong (a different hash).
        detail: path, or instructions.
    """

    name: str
    state: State
    detail: str


def list_weights() -> list[Weight | Snapshot]:
    """Return all files and folders that are constants of modules in `kvbench.eval`, sorted by name."""
    weights: dict[str, Weight | Snapshot] = {}
    here = Path(__file__).resolve().parent.parent  # pkgutil does not enter namespace packages
    for path in sorted(here.glob("*/*.py")):
        for value in vars(importlib.import_module(f"kvbench.eval.{path.parent.name}.{path.stem}")).values():
            if isinstance(value, Weight | Snapshot):
                weights[value.file] = value
    return [weights[name] for name in sorted(weights)]


def fetch(weights: Sequence[Weight | Snapshot], *, download: bool = True) -> list[Report]:
    """Find each file, or download it, and return a report on each in order; an unreachable host is contacted once."""
    silent: dict[str, str] = {}
    return [_fetch(weight, silent, download=download) for weight in weights]


def download_file(url: str, target: Path, sha256: str | None = None) -> None:
    """Download one file, complete or not at all.

    An interrupted download resumes if the hash is known, else it starts again.

    Args:
        url: http, https or file.
        target: path of the file.
        sha256: expected hash; None accepts any content.

    Raises:
        OSError: the address cannot be read, the target cannot be written, or the download ended early.
        WeightError: the file's hash differs.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.part")
    if sha256 is None:
        part.unlink(missing_ok=True)
    receive(url, part, target.name)
    if sha256 is not None and (actual := hash_path(part)) != sha256:
        part.unlink()
        raise WeightError(f"{url} is not the expected file: sha256 {actual}, expected {sha256}")
    part.replace(target)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return 1 if a file's hash differs, else 0."""
    parser = argparse.ArgumentParser(prog="python -m kvbench.eval.files.fetch", description=__doc__)
    parser.add_argument("names", nargs="*", help="files or folders, all by default")
    parser.add_argument("--list", action="store_true", help="download nothing")
    options = parser.parse_args(arguments)
    known = {weight.file: weight for weight in list_weights()}
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"{unknown[0]}: no such weights; there are {', '.join(known)}")
    reports = fetch([known[name] for name in options.names or known], download=not options.list)
    width = max(len(report.name) for report in reports)
    present = ("found", "fetched")
    for report in reports:
        detail = report.detail if report.state in present else ""
        print(f"{report.state:<12}{report.name:<{width}}  {detail}".rstrip())
    for report in reports:
        if report.state not in present:
            print(f"\n{report.name}: {report.detail}")
    return int(any(report.state == "wrong" for report in reports))


def _fetch(weight: Weight | Snapshot, silent: dict[str, str], *, download: bool) -> Report:
    """Find or download a file; `silent` has the errors of unreachable hosts, and receives new ones."""
    if (path := weight.find()) is not None:
        try:
            weight.require()
        except WeightError as error:
            return Report(weight.file, "wrong", str(error))
        return Report(weight.file, "found", str(path))
    addresses = _addresses(weight)
    if not download or not addresses:
        return Report(weight.file, "missing" if addresses else "by hand", weight.directions())
    try:
        for url, target, sha256 in addresses:
            host = urlsplit(url).netloc
            if host in silent:
                raise OSError(silent[host])
            if not target.is_file():
                download_file(url, target, sha256)
        weight.require()
    except urllib.error.HTTPError as error:
        return Report(weight.file, "unreachable", f"{url}: {error}. {weight.directions()}")
    except (urllib.error.URLError, TimeoutError) as error:
        silent[host] = f"{host} cannot be reached ({getattr(error, 'reason', error)})"
        return Report(weight.file, "unreachable", f"{silent[host]}. {weight.directions()}")
    except (OSError, WeightError) as error:
        return Report(weight.file, "unreachable", f"{error}. {weight.directions()}")
    note = "" if weight.pinned else " (may change at its source: results record its hash)"
    return Report(weight.file, "fetched", f"{fetched_path(weight)}{note}")


def _addresses(weight: Weight | Snapshot) -> list[tuple[str, Path, str | None]]:
    """Return address, target and hash of each file; empty if none can be fetched."""
    if isinstance(weight, Snapshot):
        hashes, target = dict(weight.sha256), fetched_path(weight)
        files = () if weight.how else weight.files
        return [(weight.url(file), target / file, hashes.get(file)) for file in files]
    return [(weight.url, fetched_path(weight), weight.sha256)] if weight.url else []


if __name__ == "__main__":
    sys.exit(main())
