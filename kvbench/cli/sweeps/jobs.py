"""Folders of sweeps and the recorder of a job; `kvbench.runs.record.sweeps` reads what these write."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from socket import gethostname
from typing import ClassVar

from kvbench.core.bars import hiding_bars
from kvbench.core.config import ConfigError
from kvbench.core.files import hash_values, remove_unfinished, write_whole
from kvbench.runs.record.sweeps import NAME, PLAN, JobStatus, entry_of, read_entries, read_entry, read_name

REQUEUED = "requeued"
"""File whose modification time is the time of the latest requeue."""


class Recorder:
    """Writer of the entry of the job that this process works on.

    Only the leader of a job writes: of two processes, the later to write could replace the end by a start.

    Attributes:
        current: recorder of the current job; None outside a sweep.
        folder: folder of the sweep.
    """

    current: ClassVar["Recorder | None"] = None

    def __init__(self, folder: Path, number: int, overrides: tuple[str, ...], *, is_leader: bool) -> None:
        before = read_entry(folder, number, overrides)
        starts = before.starts + (before.outcome != "finished")
        self.folder, self._entry = folder, JobStatus(number, overrides, starts=starts, host=gethostname())
        self._is_leader = is_leader

    def note(self, **changes: object) -> None:
        """Change attributes of the job's entry and write it."""
        self._entry = replace(self._entry, **changes)  # type: ignore[arg-type]
        if self._is_leader:
            write_entry(self.folder, self._entry)

    def note_end(self, value: object) -> None:
        """Write the job's result: its run folder, its calibrations, or the reason of its failure."""
        if isinstance(value, str | BaseException):
            self.note(outcome="failed", error=" ".join(str(value).split()))
        else:
            folder = str(value) if isinstance(value, Path) else None
            files = tuple(map(str, value)) if isinstance(value, list) else ()
            self.note(outcome="finished", folder=folder, files=files)

    def note_run(self, folder: Path, samples: int) -> None:
        """Add the job's run or its reference, with its final number of samples."""
        self.note(samples={**self._entry.samples, str(folder): samples})


@contextmanager
def recording(
    folder: Path, number: int, overrides: tuple[str, ...], *, is_leader: bool = True
) -> Iterator[Recorder]:
    """Record the start of a job that this process leads or helps with; yield its recorder."""
    Recorder.current = Recorder(folder, number, overrides, is_leader=is_leader)
    try:
        Recorder.current.note(outcome="started")
        with hiding_bars():
            yield Recorder.current
    finally:
        Recorder.current = None


def note_run(folder: Path, samples: int) -> None:
    """Add a run to the entry of the current job, if there is one."""
    if Recorder.current is not None:
        Recorder.current.note_run(folder, samples)


def name_folder(runs_dir: Path, jobs: Sequence[tuple[str, ...]]) -> Path:
    """Return the path of a sweep's folder, a hash of its jobs; the order of overrides within a job does not matter."""
    return runs_dir / "sweeps" / hash_values([sorted(job) for job in jobs])[:12]


def find_folder(runs_dir: Path, jobs: Sequence[tuple[str, ...]]) -> Path:
    """Return the folder of a sweep, created if necessary.

    A new folder starts with the jobs that other sweeps have finished, so that an extended sweep repeats nothing.
    """
    folder = name_folder(runs_dir, jobs)
    if not (folder / PLAN).is_file():
        finished = _find_finished(folder.parent)
        for number, job in enumerate(jobs):
            if (entry := finished.get(frozenset(job))) is not None:
                write_entry(folder, replace(entry, number=number, overrides=job))
        write_whole(folder / PLAN, json.dumps(jobs, indent=1) + "\n")
    return folder


def name_sweep(folder: Path, name: str | None) -> None:
    """Write the name of a sweep, if it has one."""
    if name is not None and name != read_name(folder):
        write_whole(folder / NAME, f"{name}\n")


def label_sweep(folder: Path, choice: str | None) -> str:
    """Return the label of a sweep in tables and logs: its name, the chosen file of `conf/sweeps`, or its folder's."""
    return read_name(folder) or choice or folder.name


def find_named(runs_dir: Path, name: str) -> Path:
    """Return the folder of the sweep named `name`; of several, the one that got it last.

    Raises:
        ConfigError: no sweep has the name.
    """
    named = sorted(runs_dir.glob(f"sweeps/*/{NAME}"), key=lambda path: path.stat().st_mtime_ns)
    folders = {read_name(path.parent): path.parent for path in named}
    if name not in folders:
        names = ", ".join(sorted(str(known) for known in folders if known)) or "none has a name"
        raise ConfigError(f"sweep.name={name}: no sweep in {runs_dir} has this name; choose from {names}")
    return folders[name]


def _find_finished(sweeps: Path) -> dict[frozenset[str], JobStatus]:
    """Return the finished jobs of all sweeps, except sweeps whose list of jobs is damaged."""
    found: dict[frozenset[str], JobStatus] = {}
    for plan in sweeps.glob(f"*/{PLAN}"):
        with suppress(ConfigError):
            entries = read_entries(plan.parent)
            found |= {frozenset(one.overrides): one for one in entries if one.outcome == "finished"}
    return found


def open_folder(runs_dir: Path, jobs: Sequence[tuple[str, ...]]) -> Path:
    """Return the folder of a sweep that starts or resumes; delete the entries of jobs that have not finished."""
    folder = find_folder(runs_dir, jobs)
    remove_unfinished(folder)
    for entry in read_entries(folder):
        if entry.outcome != "finished":
            forget(folder, entry.number)
    return folder


def forget(folder: Path, number: int) -> None:
    """Delete the entry of a job, so that the job is tried again; a missing entry is not an error."""
    entry_of(folder, number).unlink(missing_ok=True)


def write_entry(folder: Path, entry: JobStatus) -> None:
    """Write the entry of a job, replacing the previous one."""
    write_whole(entry_of(folder, entry.number), json.dumps(asdict(entry)) + "\n")


def is_newer(folder: Path, number: int, since: float) -> bool:
    """Return whether a job's entry was written at or after a time of the file system's clock."""
    path = entry_of(folder, number)
    return path.is_file() and path.stat().st_mtime >= since


def claim_of(folder: Path, number: int) -> Path:
    """Return the path of the claim on a job; see `kvbench.core.claims.claim`."""
    return folder / f".job-{number:05}"


def read_requeue(folder: Path) -> float:
    """Return the time of the latest requeue, by the file system's clock; 0 if there was none."""
    path = folder / REQUEUED
    return path.stat().st_mtime if path.is_file() else 0.0


def note_requeue(folder: Path) -> None:
    """Make running workers list all jobs of a sweep again."""
    (folder / REQUEUED).touch()
