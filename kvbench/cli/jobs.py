"""What becomes of every job of a sweep: a file each, written by the job wherever it runs, read by who started it."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from kvbench.core.files import hash_values, parse_json, write_whole

PLAN = "sweep.json"


@dataclass(frozen=True)
class Entry:
    """A job of a sweep and what is known of it.

    Attributes:
        number: the job's place in the sweep, from 0.
        overrides: what tells it from the others, and what they share.
        outcome: `missing` has left nothing yet; `started` runs, or was killed.
        folder: its run folder, if it made one.
        files: what else it left, such as calibrations.
        error: why it failed, in one line.
    """

    number: int
    overrides: tuple[str, ...]
    outcome: Literal["missing", "started", "finished", "failed"] = "missing"
    folder: str | None = None
    files: tuple[str, ...] = ()
    error: str | None = None


def list_jobs(config: DictConfig) -> list[tuple[str, ...]]:
    """Return the overrides of every job of a sweep, in the order of its numbers.

    Args:
        config: composed for the sweep, with Hydra's part.
    """
    params = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
    loader = GlobalHydra.instance().config_loader()  # knows the choices that a pattern stands for
    words = OverridesParser.create(loader).parse_overrides([*params, *config.hydra.overrides.task])
    return [tuple(job) for batch in BasicSweeper.split_arguments(words, None) for job in batch]


def open_folder(runs_dir: Path, jobs: Sequence[tuple[str, ...]]) -> Path:
    """Return the folder of a sweep, which the same jobs always have, cleared of what an earlier call left in it."""
    folder = runs_dir / "sweeps" / hash_values(jobs)[:12]
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("job-*.json"):
        path.unlink()
    write_whole(folder / PLAN, json.dumps(jobs, indent=1) + "\n")
    return folder


def write_entry(folder: Path, entry: Entry) -> None:
    """Write what is known of a job, in place of what was known before."""
    write_whole(_name(folder, entry.number), json.dumps(asdict(entry)) + "\n")


def read_entries(folder: Path) -> list[Entry]:
    """Return an entry for every job of a sweep, in order."""
    jobs = parse_json((folder / PLAN).read_text())
    return [_read_entry(folder, number, tuple(job)) for number, job in enumerate(jobs)]


def _read_entry(folder: Path, number: int, overrides: tuple[str, ...]) -> Entry:
    path = _name(folder, number)
    if not path.is_file():
        return Entry(number, overrides)
    values = parse_json(path.read_text())
    return Entry(**{**values, "overrides": tuple(values["overrides"]), "files": tuple(values["files"])})


def _name(folder: Path, number: int) -> Path:
    return folder / f"job-{number:05}.json"
