"""Status files of the jobs of a sweep: one per job, written by the job and read by every process."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from socket import gethostname
from typing import ClassVar, Literal

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

from kvbench.cli.sweeps.sweeper import split_product
from kvbench.core.files import hash_values, parse_json, remove_unfinished, write_whole

PLAN = "sweep.json"
REQUEUED = "requeued"
"""File whose time says when jobs of a sweep were last given back."""
OWN = ("against", "output", "verbose")
"""Keys, beside those of `work`, that are about what is done with a sweep, not about its jobs."""
TASKS = ("work", "status", "report")
"""Tasks that are about a sweep as a whole."""


@dataclass(frozen=True)
class Entry:
    """A job of a sweep and what is known of it.

    Attributes:
        number: the job's place in the sweep, from 0.
        overrides: of this job alone, and those that all jobs share.
        outcome: `missing` has left nothing yet; `started` runs, or was killed; `dropped` is left out of the sweep.
        folder: its run folder, if it made one.
        files: what else it left, such as calibrations.
        error: why it failed, in one line.
        samples: how many samples its run and the reference of that have in the end, by run folder.
        starts: how often it began; Ray and Slurm start a job again whose process or machine died.
        host: name of the machine on which it began last.
    """

    number: int
    overrides: tuple[str, ...]
    outcome: Literal["missing", "started", "finished", "failed", "dropped"] = "missing"
    folder: str | None = None
    files: tuple[str, ...] = ()
    error: str | None = None
    samples: Mapping[str, int] = field(default_factory=dict)
    starts: int = 0
    host: str | None = None


class Recorder:
    """Writes what is known of the job that this process works at.

    Attributes:
        current: of that job; None outside a sweep.
        folder: the sweep's.
    """

    current: ClassVar["Recorder | None"] = None

    def __init__(self, folder: Path, number: int, overrides: tuple[str, ...]) -> None:
        before = read_entry(folder, number, overrides)
        starts = before.starts + (before.outcome != "finished")
        self.folder, self._entry = folder, Entry(number, overrides, starts=starts, host=gethostname())

    def is_dropped(self) -> bool:
        """Return whether the job is left out of its sweep."""
        return drop_of(self.folder, self._entry.number).is_file()

    def note(self, **changes: object) -> None:
        """Change some attributes of the job's entry."""
        self._entry = replace(self._entry, **changes)  # type: ignore[arg-type]
        write_entry(self.folder, self._entry)

    def note_end(self, value: object) -> None:
        """Write what the job left: its run folder, its calibrations, or why it failed."""
        if isinstance(value, str | BaseException):
            self.note(outcome="failed", error=" ".join(str(value).split()))
        else:
            folder = str(value) if isinstance(value, Path) else None
            files = tuple(map(str, value)) if isinstance(value, list) else ()
            self.note(outcome="finished", folder=folder, files=files)

    def note_run(self, folder: Path, samples: int) -> None:
        """Add a run that the job makes, or its reference."""
        self.note(samples={**self._entry.samples, str(folder): samples})


@contextmanager
def recording(folder: Path, number: int, overrides: tuple[str, ...]) -> Iterator[Recorder]:
    """Write that a job has started, and give what writes the rest while the block lasts."""
    Recorder.current = Recorder(folder, number, overrides)
    try:
        Recorder.current.note(outcome="started")
        yield Recorder.current
    finally:
        Recorder.current = None


def note_run(folder: Path, samples: int) -> None:
    """Write into the entry of the job that this process works at, if there is one, a run that it makes or needs."""
    if Recorder.current is not None:
        Recorder.current.note_run(folder, samples)


def list_jobs(config: DictConfig) -> list[tuple[str, ...]]:
    """Return the overrides of every job of a sweep, in the order of its numbers.

    Args:
        config: composed for the sweep, with Hydra's part.
    """
    return split_jobs(config.hydra.sweeper.params, config.hydra.overrides.task)


def split_jobs(params: Mapping[str, object] | None, overrides: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the overrides of every job, in the order of its numbers.

    What is about the sweep as a whole is left out, and so is which of several GPUs one process takes.

    Args:
        params: of Hydra's sweeper.
        overrides: of the command line, without those of Hydra itself.
    """
    given = [f"{key}={value}" for key, value in (params or {}).items()]
    loader = GlobalHydra.instance().config_loader()  # knows the choices that a pattern stands for
    words = OverridesParser.create(loader).parse_overrides([*given, *overrides])
    kept = [word for word in words if not _is_own(word)]
    return [
        tuple("device=cuda" if word.startswith("device=cuda:") else word for word in job)
        for job in split_product(kept)
    ]


def _is_own(word: Override) -> bool:
    key = word.key_or_group
    return key in OWN or key.startswith("work.") or is_about_sweep(str(word.input_line))


def is_about_sweep(word: str) -> bool:
    """Return whether a word of the command line asks for something that is done with a sweep as a whole."""
    key, _, value = word.partition("=")
    return key == "task" and value in TASKS


def name_folder(runs_dir: Path, jobs: Sequence[tuple[str, ...]]) -> Path:
    """Return the path of a sweep's folder, which the same jobs always have, in whatever order their overrides stand."""
    return runs_dir / "sweeps" / hash_values([sorted(job) for job in jobs])[:12]


def find_folder(runs_dir: Path, jobs: Sequence[tuple[str, ...]]) -> Path:
    """Return the folder of a sweep, made if need be.

    A folder that is made now begins with what other sweeps have finished of the same jobs: a sweep that was amended.
    """
    folder = name_folder(runs_dir, jobs)
    if not (folder / PLAN).is_file():
        known = _find_finished(folder.parent)
        for number, job in enumerate(jobs):
            if (entry := known.get(frozenset(job))) is not None:
                write_entry(folder, replace(entry, number=number, overrides=job))
        write_whole(folder / PLAN, json.dumps(jobs, indent=1) + "\n")
    return folder


def _find_finished(sweeps: Path) -> dict[frozenset[str], Entry]:
    return {
        frozenset(entry.overrides): entry
        for plan in sweeps.glob(f"*/{PLAN}")
        for entry in read_entries(plan.parent)
        if entry.outcome == "finished"
    }


def open_folder(runs_dir: Path, jobs: Sequence[tuple[str, ...]]) -> Path:
    """Return the folder of a sweep that begins or goes on: what failed or came to no end before is tried again."""
    folder = find_folder(runs_dir, jobs)
    remove_unfinished(folder)
    for entry in read_entries(folder):
        if entry.outcome != "finished":
            forget(folder, entry.number)
    return folder


def forget(folder: Path, number: int) -> None:
    """Remove what is known of a job, which is then tried again."""
    _name(folder, number).unlink(missing_ok=True)


def write_entry(folder: Path, entry: Entry) -> None:
    """Write what is known of a job, in place of what was known before."""
    write_whole(_name(folder, entry.number), json.dumps(asdict(entry)) + "\n")


def read_entries(folder: Path) -> list[Entry]:
    """Return an entry for every job of a sweep, in order."""
    jobs = parse_json((folder / PLAN).read_text())
    return [read_entry(folder, number, tuple(job)) for number, job in enumerate(jobs)]


def read_entry(folder: Path, number: int, overrides: tuple[str, ...]) -> Entry:
    """Return what is known of a job that has a number and overrides."""
    entry = Entry(number, overrides)
    with suppress(FileNotFoundError):
        values = parse_json(_name(folder, number).read_text())
        entry = Entry(**{**values, "overrides": tuple(values["overrides"]), "files": tuple(values["files"])})
    return replace(entry, outcome="dropped") if drop_of(folder, number).is_file() else entry


def is_newer(folder: Path, number: int, since: float) -> bool:
    """Return whether a job's entry was written at a time of the file system's clock or later."""
    path = _name(folder, number)
    return path.is_file() and path.stat().st_mtime >= since


def claim_of(folder: Path, number: int) -> Path:
    """Return the file that a claim on a job is; see `kvbench.core.claims.claim`."""
    return folder / f".job-{number:05}"


def drop_of(folder: Path, number: int) -> Path:
    """Return the file that leaves a job out of its sweep while it exists."""
    return folder / f"dropped-{number:05}"


def read_requeue(folder: Path) -> float:
    """Return when jobs of a sweep were last given back, by the file system's clock; 0 if none was."""
    path = folder / REQUEUED
    return path.stat().st_mtime if path.is_file() else 0.0


def note_requeue(folder: Path) -> None:
    """Have running workers look at all jobs of a sweep again."""
    (folder / REQUEUED).touch()


def _name(folder: Path, number: int) -> Path:
    return folder / f"job-{number:05}.json"
