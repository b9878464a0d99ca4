"""Logs of a sweep's workers, one file each: the blocks that a worker generated and the seconds that they took."""

import json
import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname
from statistics import median
from typing import IO, Any

from kvbench.core.claims import claim, is_held, read_clock
from kvbench.core.files import parse_json

FOLDER = "workers"
"""Folder of the logs in that of a sweep."""
LATEST = 20
"""Blocks over which a worker's rate is measured."""
SLOW_WORKER = 2.0
"""Times what other workers take for a sample of the same run, from which a worker is slow."""
SLOW_BLOCK = 10.0
"""Times the median of a run's blocks, from which a block is slow."""
FEWEST = 3
"""Blocks of a run whose median another block is compared with, at least."""


@dataclass(frozen=True)
class Block:
    """A block that a worker generated: name of the run's folder, number of samples, seconds."""

    run: str
    samples: int
    seconds: float

    @property
    def pace(self) -> float:
        """Seconds a sample."""
        return self.seconds / self.samples


@dataclass(frozen=True)
class WorkerLog:
    """Work that a worker has done.

    Attributes:
        name: host, process and four digits.
        host: name of its machine.
        device: torch device.
        blocks: in the order in which they were generated.
        seconds: since the worker began, until it ended or was last heard of.
        alive: whether it runs.
    """

    name: str
    host: str
    device: str
    blocks: tuple[Block, ...]
    seconds: float
    alive: bool

    @property
    def samples(self) -> int:
        """Number of samples that it generated."""
        return sum(block.samples for block in self.blocks)

    @property
    def rate(self) -> float | None:
        """Samples a second of its latest blocks; None before the first."""
        latest = self.blocks[-LATEST:]
        return (
            sum(block.samples for block in latest) / sum(block.seconds for block in latest)
            if latest
            else None
        )


class LogWriter:
    """Writes the log of this worker.

    Args:
        file: open for appending.
        about: what the first line says.
    """

    def __init__(self, file: IO[str], about: Mapping[str, str]) -> None:
        self._file, self._began = file, time.monotonic()
        self._paces: dict[str, list[float]] = {}
        self._write(about)

    def note_block(self, block: Block) -> float | None:
        """Add a block; return how many times the median of the run's earlier ones it took if it is slow, else None."""
        self._write(vars(block))
        paces = self._paces.setdefault(block.run, [])
        times = block.pace / median(paces) if len(paces) >= FEWEST else 0.0
        paces.append(block.pace)
        return times if times >= SLOW_BLOCK else None

    def note_end(self) -> None:
        """Write that the worker ends."""
        self._write({})

    def _write(self, values: Mapping[str, object]) -> None:
        at = round(time.monotonic() - self._began, 3)
        self._file.write(json.dumps({**values, "at": at}) + "\n")
        self._file.flush()


@contextmanager
def writing_log(folder: Path, device: str, lapse: float) -> Iterator[LogWriter]:
    """Log the work of this process on a sweep, under a claim that shows whether the process runs.

    Args:
        folder: the sweep's.
        device: torch device of the worker.
        lapse: see `kvbench.core.claims.claim`.
    """
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
            writer.note_end()
    for path in (folder / FOLDER).glob(".*[!~]"):  # of workers that were killed
        with claim(path, wait=False):
            pass


def read_logs(folder: Path) -> list[WorkerLog]:
    """Return the logs of all workers that a sweep has had, by name."""
    now = read_clock(folder)
    return [
        log for path in sorted((folder / FOLDER).glob("*.jsonl")) if (log := _read(path, now)) is not None
    ]


def _read(path: Path, now: float) -> WorkerLog | None:
    lines = list(_parse(path))
    if not lines or "host" not in lines[0]:
        return None
    alive = is_held(path.with_name(f".{path.stem}"))
    return WorkerLog(
        name=path.stem,
        host=lines[0]["host"],
        device=lines[0]["device"],
        blocks=tuple(Block(one["run"], one["samples"], one["seconds"]) for one in lines if "run" in one),
        seconds=lines[-1]["at"] + (max(0.0, now - path.stat().st_mtime) if alive else 0.0),
        alive=alive,
    )


def _parse(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a log; the last may be torn."""
    for line in path.read_text().splitlines():
        try:
            yield parse_json(line)
        except ValueError:
            return


def find_slow_workers(logs: Sequence[WorkerLog]) -> dict[str, float]:
    """Return the workers that take longer than others for the runs that they share, and how many times as long."""
    by_run: dict[str, dict[str, float]] = {}
    for log in logs:
        for run, paces in _group_paces(log.blocks).items():
            by_run.setdefault(run, {})[log.name] = median(paces)
    ratios: dict[str, list[float]] = {}
    for medians in by_run.values():
        for name, own in medians.items():
            if others := [pace for other, pace in medians.items() if other != name]:
                ratios.setdefault(name, []).append(own / median(others))
    return {name: median(found) for name, found in ratios.items() if median(found) >= SLOW_WORKER}


def find_slow_blocks(logs: Sequence[WorkerLog]) -> list[tuple[str, Block, float]]:
    """Return blocks that took far longer than their run's median: worker, block, times the median."""
    medians = {
        run: median(paces)
        for run, paces in _group_paces([block for log in logs for block in log.blocks]).items()
        if len(paces) > FEWEST
    }
    return [
        (log.name, block, block.pace / medians[block.run])
        for log in logs
        for block in log.blocks
        if block.run in medians and block.pace >= SLOW_BLOCK * medians[block.run]
    ]


def _group_paces(blocks: Sequence[Block]) -> dict[str, list[float]]:
    groups: dict[str, list[float]] = {}
    for block in blocks:
        groups.setdefault(block.run, []).append(block.pace)
    return groups
