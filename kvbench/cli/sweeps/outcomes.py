"""Outcomes of a sweep's jobs: failures and run folders."""

import logging
from collections.abc import Sequence
from pathlib import Path

from kvbench.cli.config.messages import describe_error, is_expected
from kvbench.cli.console import say
from kvbench.cli.sweeps.jobs import Recorder
from kvbench.cli.sweeps.progress import find_states
from kvbench.runs.record.sweeps import JobStatus, name_jobs

log = logging.getLogger(__name__)

UNRECORDED_ERRORS = {
    "running": "a process works on it",
    "missing": "not started; run the same command again to start it",
    "interrupted": "its process was stopped or killed; run the same command again to resume it",
}
"""Error of a job that recorded no error, by its state."""


def describe_failure(error: Exception) -> str:
    """Return a line about a failure, and print it outside jobs of sweeps; log unexpected errors with a traceback."""
    if is_expected(error):
        line = describe_error(error)
    else:
        log.error("a job of the sweep failed", exc_info=error)
        line = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if Recorder.current is None:
        say(f"error: {line}", "red")
    return line


def list_failures(folder: Path, entries: Sequence[JobStatus]) -> list[tuple[str, str]]:
    """Return the state and names (`name_jobs`) of a sweep's unfinished jobs that have one error, and this error."""
    jobs: dict[tuple[str, str], list[str]] = {}
    for entry, state, name in zip(entries, find_states(folder, entries), name_jobs(entries), strict=True):
        if entry.outcome not in ("finished", "dropped"):
            jobs.setdefault((state, entry.error or UNRECORDED_ERRORS[state]), []).append(name)
    return [(f"{state} {', '.join(names)}", error) for (state, error), names in jobs.items()]


def list_runs(entries: Sequence[JobStatus]) -> list[Path]:
    """Return the distinct run folders of a sweep's jobs, without dropped jobs."""
    folders = [entry.folder for entry in entries if entry.folder and entry.outcome != "dropped"]
    return list(map(Path, dict.fromkeys(folders)))


def list_equal(entries: Sequence[JobStatus]) -> list[str]:
    """Return a line for each run of several jobs, with the overrides that change nothing in it."""
    jobs: dict[Path, list[set[str]]] = {folder: [] for folder in list_runs(entries)}
    for entry in entries:
        jobs.get(Path(entry.folder or ""), []).append(set(entry.overrides))
    return [
        f"{len(own)} jobs are one run, {folder.name}: {', '.join(sorted(differ))} change nothing in it"
        for folder, own in jobs.items()
        if (differ := own[0].union(*own) - own[0].intersection(*own))
    ]


def list_profiles(entries: Sequence[JobStatus]) -> list[Path]:
    """Return the files that jobs of `task=profile` wrote, without dropped jobs."""
    files = [Path(file) for entry in entries if entry.outcome != "dropped" for file in entry.files]
    return [file for file in dict.fromkeys(files) if file.parent.name == "profile" and file.suffix == ".json"]
