"""Progress of a sweep, read from its folder: jobs, samples and the time left; imports no torch."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, redirect_stdout
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, cast

from tqdm import tqdm

from kvbench.cli.sweeps.jobs import claim_of
from kvbench.core.background import repeating
from kvbench.core.claims import is_held, read_clock
from kvbench.core.files import read_bytes
from kvbench.runs.record.earlier import OF_EARLIER_VERSION
from kvbench.runs.record.sweeps import JobStatus, read_entries

PACE_WINDOW = 600.0
"""Seconds over which the pace is measured."""
BLOCK_SPREAD = 1.0
"""Seconds within which the samples of one block are written."""
REFRESH_INTERVAL = 2.0
"""Seconds between two updates of the progress line; five times as long in a file, as many workers may write some."""

STATES = {"started": "interrupted", "finished": "done", "earlier": OF_EARLIER_VERSION}
"""States of idle jobs where they differ from the outcome."""


@dataclass(frozen=True)
class Progress:
    """Progress of a sweep.

    Attributes:
        finished: number of finished jobs.
        running: number of jobs that a process works on.
        failed: number of failed jobs.
        missing: number of idle jobs without an outcome: not started, or interrupted.
        drawn: number of generated samples of all runs and references that did not fail.
        samples: final number of samples; a job that has not started counts as the largest run.
        seconds: estimate of the time left from the recent pace; None if no job runs or there is no pace yet.
        dropped: number of excluded jobs.
    """

    finished: int
    running: int
    failed: int
    missing: int
    drawn: int
    samples: int
    seconds: float | None
    dropped: int = 0

    def __str__(self) -> str:
        jobs = f"{self.finished} done, {self.running} running, {self.failed} failed, {self.missing} missing"
        jobs += f", {self.dropped} dropped" * (self.dropped > 0)
        left = format_seconds(self.seconds)
        return f"jobs: {jobs}; samples: {self.drawn} of {self.samples}; time left: {left}"

    @property
    def summary(self) -> str:
        """The progress in less than half a line of a terminal."""
        jobs = self.finished + self.running + self.failed + self.missing
        left = "" if self.seconds is None else f", {format_seconds(self.seconds)} left"
        failed = f", {self.failed} failed" * (self.failed > 0)
        samples = f", {self.drawn} of {self.samples} samples" * (self.samples > 0)
        return f"{self.finished} of {jobs} jobs{failed}{samples}{left}"


def format_seconds(seconds: float | None) -> str:
    """Format a time as hours, minutes and seconds; None, and a time beyond all dates, as a dash."""
    if seconds is None or abs(seconds) >= timedelta.max.total_seconds():
        return "-"
    return str(timedelta(seconds=round(seconds)))


def find_states(folder: Path, entries: Sequence[JobStatus]) -> list[str]:
    """Return the state of each job of a sweep: `running` if a process works on it, else by its outcome."""
    claimed = {path.name for path in folder.glob(".job-*")}
    places = [claim_of(folder, entry.number) for entry in entries]
    running = [place.name in claimed and is_held(place) for place in places]
    others = (STATES.get(entry.outcome, entry.outcome) for entry in entries)
    return ["running" if runs else other for runs, other in zip(running, others, strict=True)]


def measure(folder: Path, entries: Sequence[JobStatus], states: Sequence[str]) -> Progress:
    """Return the progress of the sweep in a folder from its jobs and their states."""
    counts = {name: states.count(name) for name in ("running", "failed", "dropped")}
    finished = states.count("done")
    useful = [entry for entry in entries if entry.outcome not in ("failed", "dropped")]
    runs = {Path(run): count for entry in useful for run, count in entry.samples.items()}
    ahead = sum(entry.outcome != "finished" and not entry.samples for entry in useful)
    drawn = sum(count_drawn(run, count) for run, count in runs.items())
    samples = sum(runs.values()) + ahead * max(runs.values(), default=0)
    pace = measure_pace(folder, list(runs)) if counts["running"] else None
    missing, left = (
        len(entries) - finished - sum(counts.values()),
        None if pace is None else pace * (samples - drawn),
    )
    return Progress(finished, **counts, missing=missing, drawn=drawn, samples=samples, seconds=left)


def count_drawn(run: Path, count: int) -> int:
    """Return the number of samples that a run of `count` samples has so far."""
    if (run / "results.json").is_file():
        return count
    records = run / "samples.jsonl"
    return min(count, read_bytes(records).count(b"\n")) if records.is_file() else 0


def measure_pace(folder: Path, runs: Sequence[Path]) -> float | None:
    """Return the recent seconds per sample of all workers together; None before the second block."""
    now = read_clock(folder)
    records = [run / "samples.jsonl" for run in runs]
    times = [
        time
        for run, path in zip(runs, records, strict=True)
        if path.is_file() and now - path.stat().st_mtime < PACE_WINDOW
        for kind in ("images", "texts")
        for time in _list_times(run / kind, now - PACE_WINDOW)
    ]
    first = min(times, default=now)
    later = sum(time > first + BLOCK_SPREAD for time in times)
    return (now - first) / later if later else None


def _list_times(folder: str | Path, since: float) -> Iterator[float]:
    """Yield the modification times, after `since`, of the samples in a folder and its subfolders."""
    if not Path(folder).is_dir():
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(".") or (time := entry.stat().st_mtime) <= since:
                continue
            if entry.is_dir():
                yield from _list_times(entry.path, since)
            else:
                yield time


class _AboveBars:
    """Stream that prints lines above the progress bars of stderr; a line is held until it is whole."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream, self._held = stream, ""

    def write(self, text: str) -> int:
        with tqdm.external_write_mode(file=sys.stderr):  # holds the lock of all bars
            lines, end, self._held = (self._held + text).rpartition("\n")
            self._stream.write(lines + end)
            self._stream.flush()  # buffered text would be printed after the bar
        return len(text)

    def close(self) -> None:
        """Print the text after the latest end of a line; the stream itself stays open."""
        self._stream.write(self._held)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


@contextmanager
def watch(folder: Path, show_ended: Callable[[Sequence[JobStatus]], None]) -> Iterator[None]:
    """Call `show_ended` periodically, which prints ended jobs, above a progress line if stderr is a terminal."""
    layout = {"bar_format": "{desc} {bar:20}", "leave": False, "disable": None}  # None: not in a file
    with (
        closing(_AboveBars(sys.stdout)) as above,
        tqdm(total=1, **layout) as bar,
        redirect_stdout(cast(IO[str], above)),
    ):

        def update() -> None:
            entries = read_entries(folder)
            show_ended(entries)
            if not bar.disable:
                now = measure(folder, entries, find_states(folder, entries))
                bar.total, bar.n = max(now.samples, 1), now.drawn
                bar.set_description_str(now.summary)

        try:
            with repeating(update, REFRESH_INTERVAL * (5 if bar.disable else 1)):
                yield
        finally:
            show_ended(read_entries(folder))
