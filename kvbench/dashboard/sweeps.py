"""Progress and runs of sweeps, from the status files of their jobs below `runs_dir`/sweeps."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.core.files import parse_json, read_text

NAME = "name.txt"
"""File with the name that the user gave a sweep."""


@dataclass(frozen=True)
class Sweep:
    """A sweep.

    Attributes:
        folder: below `runs_dir`, with slashes.
        name: the user's name of it, or the name of its folder.
        jobs: number of jobs without dropped ones.
        finished: number of finished jobs.
        started: number of jobs that run or were killed.
        failed: name and error of each failed job.
        runs: folders of finished runs, `<model>/<run>`.
    """

    folder: str
    name: str
    jobs: int
    finished: int
    started: int
    failed: tuple[tuple[str, str], ...]
    runs: tuple[str, ...]


def find_sweeps(runs_dir: Path) -> tuple[Sweep, ...]:
    """Read all sweeps; unreadable ones are left out."""
    sweeps = (_read_sweep(runs_dir, path) for path in sorted(runs_dir.glob("sweeps/*/sweep.json")))
    return tuple(sweep for sweep in sweeps if sweep is not None)


def _read_sweep(runs_dir: Path, path: Path) -> Sweep | None:
    jobs = _read(path)
    if not isinstance(jobs, list) or not jobs or not all(isinstance(job, list) for job in jobs):
        return None
    dropped = {file.name.removeprefix("dropped-") for file in path.parent.glob("dropped-*")}
    files = sorted(path.parent.glob("job-*.json"))
    read = [_read(file) for file in files if file.stem.removeprefix("job-") not in dropped]
    entries = [entry for entry in read if isinstance(entry, Mapping)]
    shared = set.intersection(*({str(word) for word in job} for job in jobs))
    failed = [entry for entry in entries if entry.get("outcome") == "failed"]
    return Sweep(
        folder=path.parent.relative_to(runs_dir).as_posix(),
        name=_read_name(path.parent),
        jobs=len(jobs) - len(dropped),
        finished=_count(entries, "finished"),
        started=_count(entries, "started"),
        failed=tuple((_name(entry, shared), str(entry.get("error"))) for entry in failed),
        runs=tuple(
            "/".join(Path(entry["folder"]).parts[-2:])
            for entry in entries
            if entry.get("outcome") == "finished" and isinstance(entry.get("folder"), str)
        ),
    )


def _read_name(folder: Path) -> str:
    try:
        return read_text(folder / NAME).strip() or folder.name
    except (OSError, ValueError):
        return folder.name


def _read(path: Path) -> Any:
    try:
        return parse_json(read_text(path))
    except (OSError, ValueError):
        return None


def _count(entries: list[Mapping[str, object]], outcome: str) -> int:
    return sum(entry.get("outcome") == outcome for entry in entries)


def _name(entry: Mapping[str, object], shared: Collection[str]) -> str:
    """Return the overrides of a job that not all jobs share."""
    overrides = entry.get("overrides")
    words = [str(word) for word in overrides] if isinstance(overrides, list) else []
    return " ".join(word for word in words if word not in shared) or "the one job"
