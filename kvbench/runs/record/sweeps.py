"""Status files of a sweep: its list of jobs, its name and one file for each job, read by every process."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Literal

from kvbench.core.config import ConfigError, check_fields
from kvbench.core.files import parse_json, read_bytes, read_text
from kvbench.runs.record.earlier import OF_EARLIER_VERSION, is_earlier

Outcome = Literal["missing", "started", "finished", "failed", "dropped", "earlier"]

PLAN = "sweep.json"
NAME = "name.txt"
"""File with the name that the user gave a sweep (`sweep.name`)."""


@dataclass(frozen=True)
class JobStatus:
    """State of a job of a sweep.

    Attributes:
        number: index of the job in the sweep.
        overrides: overrides of the job, including overrides that all jobs share.
        outcome: `missing`: no result yet; `started`: running or killed; `dropped`: excluded from the sweep; `earlier`:
            finished by an earlier version, whose run does not count.
        folder: run folder of the job, if any.
        files: other files that the job wrote, such as calibrations.
        error: reason of a failure, in one line.
        samples: final number of samples of its run and of the reference, by run folder.
        starts: number of starts; Ray and Slurm restart a job whose process or host died.
        host: name of the host of the latest start.
    """

    number: int
    overrides: tuple[str, ...]
    outcome: Outcome = "missing"
    folder: str | None = None
    files: tuple[str, ...] = ()
    error: str | None = None
    samples: Mapping[str, int] = field(default_factory=dict)
    starts: int = 0
    host: str | None = None


def read_entries(folder: Path) -> list[JobStatus]:
    """Return an entry for every job of a sweep, in order.

    Raises:
        ConfigError: the list of jobs is damaged.
    """
    path = folder / PLAN
    try:
        jobs = parse_json(read_bytes(path))
        are_lists = isinstance(jobs, list) and all(isinstance(job, list) for job in jobs)
        if not are_lists or not all(isinstance(word, str) for job in jobs for word in job):
            raise ValueError("not a list of lists of strings")
    except ValueError as error:
        raise ConfigError(
            f"{path}: damaged ({error}); start the sweep again after deleting {folder}"
        ) from None
    return [read_entry(folder, number, tuple(job)) for number, job in enumerate(jobs)]


def read_entry(folder: Path, number: int, overrides: tuple[str, ...]) -> JobStatus:
    """Return the entry of a job: `missing` if none was written, `failed` if its file is damaged."""
    entry, path = JobStatus(number, overrides), entry_of(folder, number)
    try:
        entry = _make_entry(entry, parse_json(read_bytes(path), finite=True))
    except FileNotFoundError:
        pass
    except (ValueError, KeyError) as error:
        entry = replace(entry, outcome="failed", error=f"{path}: damaged ({error}); run the job again")
    if drop_of(folder, number).is_file():
        return replace(entry, outcome="dropped")
    if entry.folder and is_earlier(Path(entry.folder)):
        reason = f"{entry.folder} is {OF_EARLIER_VERSION}; run the same command again to make it anew"
        return JobStatus(number, overrides, "earlier", error=reason)
    return entry


def _make_entry(missing: JobStatus, values: object) -> JobStatus:
    """Return the missing entry of a job with its JSON values; a ValueError names the first of a wrong type."""
    if not isinstance(values, dict):
        raise ValueError("not an object")
    known = {field.name: values[field.name] for field in fields(JobStatus) if field.name in values}
    check_fields(known, JobStatus, "")
    known |= {key: tuple(value) for key, value in known.items() if isinstance(value, list)}
    return replace(missing, **{**known, "number": missing.number})


def read_name(folder: Path) -> str | None:
    """Return the name of a sweep; None if it has none."""
    try:
        return read_text(folder / NAME).strip() or None
    except (OSError, ValueError):
        return None


def name_jobs(entries: Sequence[JobStatus]) -> list[str]:
    """Return each job's overrides that not all jobs share, as `h2o 0.1 sinks=2`, or all overrides of a single job."""
    shared = set.intersection(*(set(entry.overrides) for entry in entries)) if len(entries) > 1 else set()
    words = [[word for word in entry.overrides if word not in shared] for entry in entries]
    for own in words:
        own.sort(key=lambda word: not word.startswith("method="))
    return [re.sub(r"(^| )method[=.]|(?<= )budget=", r"\1", " ".join(own)) for own in words]


def drop_of(folder: Path, number: int) -> Path:
    """Return the path of the file that excludes a job from its sweep."""
    return folder / f"dropped-{number:05}"


def entry_of(folder: Path, number: int) -> Path:
    """Return the path of the file of a job."""
    return folder / f"job-{number:05}.json"
