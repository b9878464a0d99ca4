"""Run folders by state: finished, unfinished with progress, damaged, of an earlier version; and progress of sweeps.

Sweeps are read from the status files of their jobs below `runs_dir`/sweeps.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from kvbench.core.config import MAX_PROMPTS, ConfigError
from kvbench.core.files import parse_json, read_bytes, read_text
from kvbench.dashboard.plain_yaml import parse_yaml
from kvbench.runs.record.earlier import is_earlier
from kvbench.runs.record.folder import LEFT, RECORDS
from kvbench.runs.record.results import FILE, Results, read_results
from kvbench.runs.record.sweeps import PLAN, name_jobs, read_entries, read_name

RUN_FILES = (FILE, "config.yaml", RECORDS, "status")
"""Files of which every run folder contains at least one."""


@dataclass(frozen=True)
class Unfinished:
    """A run without results.

    Attributes:
        folder: below `runs_dir`, with slashes.
        status: `running`, `failed: <reason>`, or `started` if unknown.
        done: number of samples so far.
        total: number of all samples; None if unknown.
        changed: UTC time of the last sample, or of the folder, ISO 8601; empty if neither exists.
    """

    folder: str
    status: str
    done: int
    total: int | None
    changed: str


@dataclass(frozen=True)
class Damaged:
    """A run whose results cannot be read, with the reason."""

    folder: str
    reason: str


@dataclass(frozen=True)
class RunFolders:
    """Runs of a `runs_dir` by state, ordered by path; of an earlier version only the folder is read.

    Runs that a race stopped (`LEFT`) are in no state, as they are neither finished nor to be continued.
    """

    finished: Mapping[Path, Results]
    unfinished: tuple[Unfinished, ...]
    damaged: tuple[Damaged, ...]
    earlier: tuple[str, ...]


def find_folders(runs_dir: Path, chosen: Iterable[Path] | None = None) -> RunFolders:
    """Read the chosen run folders, by default every one below `runs_dir`.

    No state of a folder raises an error, even while a process writes it.
    """
    finished: dict[Path, Results] = {}
    unfinished: list[Unfinished] = []
    damaged: list[Damaged] = []
    earlier: list[str] = []
    for folder in sorted(runs_dir.glob("*/*/") if chosen is None else chosen):
        name = folder.relative_to(runs_dir).as_posix()
        if not any((folder / sign).is_file() for sign in RUN_FILES):
            continue
        if is_earlier(folder):
            earlier.append(name)
            continue
        try:
            results = read_results(folder)
        except ConfigError as error:
            damaged.append(Damaged(name, str(error)))
            continue
        if results is not None:
            finished[folder] = results
        elif (status := _read_status(folder)) != LEFT:
            done = len({str(line.get("index")) for line in read_lines(folder / RECORDS)})
            unfinished.append(Unfinished(name, status, done, _count_prompts(folder), _read_time(folder)))
    return RunFolders(finished, tuple(unfinished), tuple(damaged), tuple(earlier))


def read_lines(path: Path) -> list[Mapping[str, object]]:
    """Return the objects of a JSON Lines file; other lines, such as an incomplete last one, are left out."""
    try:
        lines = read_bytes(path).split(b"\n")
    except OSError:
        return []
    lines = [line for line in lines if line]
    values = _parse(b"[" + b",".join(lines) + b"]")  # much faster than line by line
    if not isinstance(values, list) or len(values) != len(lines):
        values = map(_parse, lines)
    return [value for value in values if isinstance(value, dict)]


def _parse(line: bytes) -> object:
    try:
        return parse_json(line, finite=True)
    except ValueError:
        return None


def _read_status(folder: Path) -> str:
    try:
        return read_text(folder / "status", errors="replace").strip() or "started"
    except OSError:
        return "started"


def _count_prompts(folder: Path) -> int | None:
    """Return the configured number of samples; None for all prompts of a set, or if unknown."""
    try:
        config = parse_yaml(read_bytes(folder / "config.yaml"))
    except (OSError, ValueError):
        return None
    prompts = config.get("prompts") if isinstance(config, dict) else None
    if isinstance(prompts, dict):
        prompts = prompts.get("of", prompts)  # prompts=own holds its prompt set in `of`
    if not isinstance(prompts, dict):
        return None
    count, each = prompts.get("count"), prompts.get("per_prompt", 1)
    if type(count) is not int or type(each) is not int:
        return None
    return count * each if 0 <= count * each <= MAX_PROMPTS else None


def _read_time(folder: Path) -> str:
    for path in (folder / RECORDS, folder):
        try:
            return datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(timespec="seconds")
        except (OSError, ValueError, OverflowError):  # missing, or a time that no calendar has
            continue
    return ""


@dataclass(frozen=True)
class Sweep:
    """A sweep.

    Attributes:
        folder: below `runs_dir`, with slashes.
        name: name that the user gave, or the name of the folder.
        jobs: number of jobs, except dropped ones.
        finished: number of finished jobs.
        started: number of jobs that are running or were killed.
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
    sweeps = (_read_sweep(runs_dir, path.parent) for path in sorted(runs_dir.glob(f"sweeps/*/{PLAN}")))
    return tuple(sweep for sweep in sweeps if sweep is not None and sweep.jobs)


def _read_sweep(runs_dir: Path, folder: Path) -> Sweep | None:
    try:
        entries = [entry for entry in read_entries(folder) if entry.outcome != "dropped"]
    except (ConfigError, OSError):
        return None
    finished = [entry for entry in entries if entry.outcome == "finished"]
    names = name_jobs(entries)
    failed = [(name, entry) for name, entry in zip(names, entries, strict=True) if entry.outcome == "failed"]
    return Sweep(
        folder=folder.relative_to(runs_dir).as_posix(),
        name=read_name(folder) or folder.name,
        jobs=len(entries),
        finished=len(finished),
        started=sum(entry.outcome == "started" for entry in entries),
        failed=tuple((name or "the one job", str(entry.error)) for name, entry in failed),
        runs=tuple("/".join(Path(entry.folder).parts[-2:]) for entry in finished if entry.folder),
    )
