"""Megabytes that the base dependencies and each extra take on disk, counted in the installed environment.

A row counts every file of the distributions that an extra brings beside the base, without compiled modules. An extra
of which a distribution is not installed is left out.
"""

import argparse
import importlib.metadata
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from rich.console import Console

from kvbench.report.tables import Row, print_rows

OPTIONS = {}
PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
MB = 1e6


def main(_: argparse.Namespace) -> None:
    """Print the table."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    base = find_distributions(project["dependencies"])
    rows: list[Row] = [
        _make_row("base", base),
        _make_row("  of it torch, CUDA, Triton", set(filter(_is_torch, base))),
    ]
    for extra, lines in project["optional-dependencies"].items():
        try:
            rows.append(_make_row(extra, find_distributions(_expand(lines, project)) - base))
        except importlib.metadata.PackageNotFoundError as error:
            print(f"{extra} is left out: {error.name} is not installed")
    print_rows(Console(), "Installed size", rows, 1)


def find_distributions(lines: list[str]) -> set[str]:
    """Return the distributions that requirements bring on this platform, by canonical name.

    Raises:
        PackageNotFoundError: one is not installed.
    """
    found: set[tuple[str, str]] = set()
    waiting = [(Requirement(line), "") for line in lines]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        for wanted in ("", *requirement.extras):
            if (name, wanted) not in found:
                found.add((name, wanted))
                waiting += [(Requirement(line), wanted) for line in importlib.metadata.requires(name) or ()]
    return {name for name, _ in found}


def _expand(lines: list[str], project: dict) -> list[str]:
    """Replace kvbench's own extras by their lines."""
    own: list[str] = []
    for line in lines:
        requirement = Requirement(line)
        if requirement.name == "kvbench":
            for extra in requirement.extras:
                own += _expand(project["optional-dependencies"][extra], project)
        else:
            own.append(line)
    return own


def _is_torch(name: str) -> bool:
    return name in ("torch", "triton") or name.startswith(("nvidia-", "cuda-"))


def _list_sizes(name: str) -> Iterator[int]:
    for file in importlib.metadata.files(name) or ():
        path = Path(str(file.locate()))
        if path.suffix != ".pyc" and path.is_file():
            yield path.stat().st_size


def _make_row(label: str, names: set[str]) -> Row:
    size = sum(sum(_list_sizes(name)) for name in names)
    return {"install": label, "packages": str(len(names)), "MB": f"{size / MB:.0f}"}
