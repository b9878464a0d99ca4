"""Logs of a sweep's workers, one file each: generated blocks and their seconds."""

import json
import logging
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname
from typing import IO, Any

from kvbench.core.claims import claim, is_held, read_clock
from kvbench.core.files import parse_json, read_bytes

log = logging.getLogger(__name__)

FOLDER = "workers"
"""Subfolder of a sweep's folder with the workers' logs."""
RATE_WINDOW = 20
"""Number of latest blocks over which a worker's rate is measured."""


@dataclass(frozen=True)
class Block:
    """A generated block: name of the run's folder, number of samples, seconds."""

    run: str
    samples: int
    seconds: float


@dataclass(frozen=True)
class WorkerLog:
    """Log of one worker.

    Attributes:
        name: host, process id and four hex digits.
        host: name of its host.
        device: torch device.
        blocks: blocks in order of generation.
        seconds: seconds from the worker's start to its end or latest heartbeat.
        alive: whether the worker still runs.
    """

    name: str
    host: str
    device: str
    blocks: tuple[Block, ...]
    seconds: float
    alive: bool

    @property
    def samples(self) -> int:
        """Number of samples that the worker generated."""
        return sum(block.samples for block in self.blocks)

    @property
    def rate(self) -> float | None:
        """Samples per second of the latest blocks; None before the first block."""
        latest = self.blocks[-RATE_WINDOW:]
        seconds = sum(block.seconds for block in latest)
        return sum(block.samples for block in latest) / seconds if seconds > 0 else None


class LogWriter:
    """Writer of this worker's log: a header line, then a line for each block."""

    def __init__(self, file: IO[str], header: Mapping[str, str]) -> None:
        self._file, self._began = file, time.monotonic()
        self.write(header)

    def write(self, values: Mapping[str, object]) -> None:
        """Append a line: the header, a block, or at the worker's end nothing but the time."""
        at = round(time.monotonic() - self._began, 3)
        self._file.write(json.dumps({**values, "at": at}) + "\n")
        self._file.flush()


@contextmanager
def writing_log(folder: Path, device: str, lapse: float) -> Iterator[LogWriter]:
    """Log the work of this process in a sweep's folder; a claim on a file shows other processes that it runs."""
    host = gethostname()
    name = f"{host}-{os.getpid()}-{uuid.uuid4().hex[:4]}"
    with (
        claim(folder / FOLDER / f".{name}", lapse=lapse),
        (folder / FOLDER / f"{name}.jsonl").open("a") as file,
    ):
        writer = LogWriter(file, {"host": host, "device": device})
        try:
            yield writer
        finally:
            writer.write({})
    for path in (folder / FOLDER).glob(".*[!~]"):  # left behind by killed workers
        with claim(path, wait=False):
            pass


def read_logs(folder: Path) -> list[WorkerLog]:
    """Return the logs of all workers of a sweep, sorted by name."""
    now = read_clock(folder)
    return [
        log for path in sorted((folder / FOLDER).glob("*.jsonl")) if (log := _read(path, now)) is not None
    ]


def _read(path: Path, now: float) -> WorkerLog | None:
    """Return the log in a file; None if it is empty or, with a warning, damaged."""
    try:
        lines = list(_parse(path))
        if not lines or "host" not in lines[0]:
            return None
        alive = is_held(path.with_name(f".{path.stem}"))
        blocks = (one for one in lines if "run" in one)
        return WorkerLog(
            name=path.stem,
            host=str(lines[0]["host"]),
            device=str(lines[0]["device"]),
            blocks=tuple(
                Block(str(one["run"]), int(one["samples"]), float(one["seconds"])) for one in blocks
            ),
            seconds=float(lines[-1]["at"]) + (max(0.0, now - path.stat().st_mtime) if alive else 0.0),
            alive=alive,
        )
    except (ValueError, KeyError, TypeError) as error:
        log.warning("%s: damaged (%s %s); left out", path, type(error).__name__, error)
        return None


def _parse(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a log up to an incomplete one."""
    for line in read_bytes(path).split(b"\n"):
        try:
            yield parse_json(line, finite=True)
        except ValueError:
            return
