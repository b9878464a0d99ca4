"""Status files of the jobs of a sweep: one per job, written by the job and read by every process."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from socket import gethostname
from typing import ClassVar, Literal

from kvbench.core.bars import hiding_bars
from kvbench.core.config import ConfigError, check_fields
from kvbench.core.files import hash_values, parse_json, read_bytes, read_text, remove_unfinished, write_whole
from kvbench.runs.record.earlier import OF_EARLIER_VERSION, is_earlier

Outcome = Literal["missing", "started", "finished", "failed", "dropped", "earlier"]

PLAN = "sweep.json"
NAME = "name.txt"
"""File with the name that the user gave a sweep (`sweep.name`)."""
REQUEUED = "requeued"
"""File whose modification time is the time of the latest requeue."""


@dataclass(frozen=True)
class JobStatus:
    """State of a job of a sweep.

    Attributes:
        number: index of the job in the sweep.
        overrides: overrides of the job, including the ones that all jobs share.
        outcome: `missing`: no result yet; `started`: running or killed; `dropped`: excluded from the sweep; `earlier`:
            finished by an earlier version, whose run does not count.
        folder: run folder of the job, if any.
        files: other files that the job wrote, such as calibrations.
        error: reason of a failure, in one line.
        samples: final number of samples of its run and of the reference, by run folder.
        starts: number of starts; Ray and Slurm restart a job whose process or machine died.
        host: name of the machine of the latest start.
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


class Recorder:
    """Writes the entry of the job that this process works on.

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


def read_name(folder: Path) -> str | None:
    """Return the name of a sweep; None if it has none."""
    try:
        return read_text(folder / NAME).strip() or None
    except (OSError, ValueError):
        return None


def label_sweep(folder: Path, choice: str | None) -> str:
    """Return the label of a sweep in tables and logs: its name, the chosen file of `conf/sweeps`, or its folder's."""
    return read_name(folder) or choice or folder.name


def find_named(runs_dir: Path, name: str) -> Path:
    """Return the folder of the sweep with a name; of several, the one that got it last.

    Raises:
        ConfigError: there is none.
    """
    named = sorted(runs_dir.glob(f"sweeps/*/{NAME}"), key=lambda path: path.stat().st_mtime_ns)
    folders = {read_name(path.parent): path.parent for path in named}
    if name not in folders:
        names = ", ".join(sorted(str(known) for known in folders if known)) or "none has a name"
        raise ConfigError(f"sweep.name={name}: no sweep in {runs_dir} has this name; choose from {names}")
    return folders[name]


def describe_sweep(folder: Path, name: str | None, jobs: int) -> str:
    """Return one line with the name, the folder and the number of jobs of a sweep."""
    return f"sweep{'' if name is None else f' {name}'}: {jobs} job{'s' * (jobs != 1)}, {folder}"


def name_jobs(entries: Sequence[JobStatus]) -> list[str]:
    """Return what each job sets that not all set, `h2o 0.1 sinks=2`, the method first; all of a single job's."""
    shared = set.intersection(*(set(entry.overrides) for entry in entries)) if len(entries) > 1 else set()
    words = [[word for word in entry.overrides if word not in shared] for entry in entries]
    for own in words:
        own.sort(key=lambda word: not word.startswith("method="))
    return [re.sub(r"(^| )method[=.]|(?<= )budget=", r"\1", " ".join(own)) for own in words]


def _find_finished(sweeps: Path) -> dict[frozenset[str], JobStatus]:
    """Return the finished jobs of all sweeps, but those whose list of jobs is damaged."""
    found: dict[frozenset[str], JobStatus] = {}
    for plan in sweeps.glob(f"*/{PLAN}"):
        with suppress(ConfigError):
            entries = read_entries(plan.parent)
            found |= {frozenset(one.overrides): one for one in entries if one.outcome == "finished"}
    return found


def open_folder(runs_dir: Path, jobs: Sequence[tuple[str, ...]]) -> Path:
    """Return the folder of a sweep that starts or resumes; unfinished and failed jobs become missing."""
    folder = find_folder(runs_dir, jobs)
    remove_unfinished(folder)
    for entry in read_entries(folder):
        if entry.outcome != "finished":
            forget(folder, entry.number)
    return folder


def forget(folder: Path, number: int) -> None:
    """Delete the entry of a job, so that the job is tried again; a missing entry is not an error."""
    _name(folder, number).unlink(missing_ok=True)


def write_entry(folder: Path, entry: JobStatus) -> None:
    """Write the entry of a job, replacing the previous one."""
    write_whole(_name(folder, entry.number), json.dumps(asdict(entry)) + "\n")


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
            raise ValueError("not a list of lists of words")
    except ValueError as error:
        raise ConfigError(
            f"{path}: damaged ({error}); start the sweep again after deleting {folder}"
        ) from None
    return [read_entry(folder, number, tuple(job)) for number, job in enumerate(jobs)]


def read_entry(folder: Path, number: int, overrides: tuple[str, ...]) -> JobStatus:
    """Return the entry of a job; a missing one if none was written, a failed one if its file is damaged."""
    entry, path = JobStatus(number, overrides), _name(folder, number)
    try:
        entry = _make_entry(number, parse_json(read_bytes(path), finite=True))
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


def _make_entry(number: int, values: object) -> JobStatus:
    """Build an entry from JSON values; a ValueError names the first of a wrong type."""
    if not isinstance(values, dict):
        raise ValueError("not an object")
    known = {field.name: values[field.name] for field in fields(JobStatus) if field.name in values}
    check_fields(known, JobStatus, "")
    known |= {key: tuple(value) for key, value in known.items() if isinstance(value, list)}
    return JobStatus(**{**known, "number": number})


def is_newer(folder: Path, number: int, since: float) -> bool:
    """Return whether a job's entry was written at or after a time of the file system's clock."""
    path = _name(folder, number)
    return path.is_file() and path.stat().st_mtime >= since


def claim_of(folder: Path, number: int) -> Path:
    """Return the path of the claim on a job; see `kvbench.core.claims.claim`."""
    return folder / f".job-{number:05}"


def drop_of(folder: Path, number: int) -> Path:
    """Return the path of the file that excludes a job from its sweep."""
    return folder / f"dropped-{number:05}"


def read_requeue(folder: Path) -> float:
    """Return the time of the latest requeue, by the file system's clock; 0 if there was none."""
    path = folder / REQUEUED
    return path.stat().st_mtime if path.is_file() else 0.0


def note_requeue(folder: Path) -> None:
    """Make running workers list all jobs of a sweep again."""
    (folder / REQUEUED).touch()


def _name(folder: Path, number: int) -> Path:
    return folder / f"job-{number:05}.json"
