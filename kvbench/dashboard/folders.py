"""Run folders in any state: finished, unfinished with their progress, damaged."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import yaml

from kvbench.core.config import ConfigError
from kvbench.runs.record.folder import RECORDS
from kvbench.runs.record.results import FILE, Results, read_results

SIGNS = (FILE, "config.yaml", RECORDS, "status")
"""Files of which a run folder holds at least one."""


@dataclass(frozen=True)
class Unfinished:
    """A run without results.

    Attributes:
        folder: below `runs_dir`, with slashes.
        status: `running`, `failed: <why>`, or `started` where the folder does not say.
        done: samples that are there.
        total: samples that there will be; None where the configuration does not say.
        changed: UTC time of the last sample, or of the folder; empty if both are gone.
    """

    folder: str
    status: str
    done: int
    total: int | None
    changed: str


@dataclass(frozen=True)
class Damaged:
    """A run whose results cannot be read, and why."""

    folder: str
    reason: str


@dataclass(frozen=True)
class Found:
    """Contents of a `runs_dir`, ordered by path; finished runs by folder."""

    finished: Mapping[Path, Results]
    unfinished: tuple[Unfinished, ...]
    damaged: tuple[Damaged, ...]


def find_folders(runs_dir: Path) -> Found:
    """Read every run folder below `runs_dir`; none of them can make it fail, as others may be writing to them."""
    finished: dict[Path, Results] = {}
    unfinished: list[Unfinished] = []
    damaged: list[Damaged] = []
    for folder in sorted(runs_dir.glob("*/*/")):
        name = folder.relative_to(runs_dir).as_posix()
        if not any((folder / sign).is_file() for sign in SIGNS):
            continue
        try:
            results = read_results(folder)
        except ConfigError as error:
            damaged.append(Damaged(name, str(error)))
            continue
        if results is None:
            unfinished.append(_describe(folder, name))
        else:
            finished[folder] = results
    return Found(finished, tuple(unfinished), tuple(damaged))


def read_lines(path: Path) -> list[Mapping[str, object]]:
    """Return the JSON objects of a file with one a line; lines that are none, such as a torn end, are left out."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError:
        return []
    return [value for line in lines if isinstance(value := _parse(line), dict)]


def _parse(line: bytes) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _describe(folder: Path, name: str) -> Unfinished:
    done = {str(line.get("index")) for line in read_lines(folder / RECORDS)}
    return Unfinished(name, _read_status(folder), len(done), _count_prompts(folder), _read_time(folder))


def _read_status(folder: Path) -> str:
    try:
        return (folder / "status").read_text(encoding="utf-8", errors="replace").strip() or "started"
    except OSError:
        return "started"


def _count_prompts(folder: Path) -> int | None:
    """Return how many prompts the configuration asks for; None where all of a set were, or it cannot be read."""
    try:
        config = yaml.safe_load((folder / "config.yaml").read_bytes())
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return None
    prompts = config.get("prompts") if isinstance(config, dict) else None
    count = prompts.get("count") if isinstance(prompts, dict) else None
    each = prompts.get("per_prompt", 1) if isinstance(prompts, dict) else 1
    return count * each if type(count) is int and type(each) is int else None


def _read_time(folder: Path) -> str:
    for path in (folder / RECORDS, folder):
        try:
            return datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(timespec="seconds")
        except OSError:
            continue
    return ""
