"""Control of a running sweep by small files in its folder, which every worker reads between two blocks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from kvbench.cli.sweeps.jobs import Entry, drop_of, forget, note_requeue, read_entries
from kvbench.cli.workers.hosts import readmit_hosts
from kvbench.core.config import ConfigError
from kvbench.core.files import write_whole

HELD = "held"
"""File in a sweep's folder while workers are to wait or, with the line `STOP`, those that began before it to end."""
STOP = "stop"
LISTED = 8
"""Runs that an error message offers."""


def control(folder: Path, verb: str, run: str | int | None = None) -> str:
    """Do what `work.do` asks for with a sweep and return one line that says what happened.

    Args:
        folder: the sweep's.
        verb: `pause`, `resume`, `stop`, `requeue` or `drop`.
        run: which runs are meant, see `find_runs`; None for all that failed, and for hosts that were stopped.

    Raises:
        ConfigError: no run of the sweep is meant, or a verb without runs is given one.
    """
    if verb in (whole := {"pause": _pause, "resume": _resume, "stop": _stop}):
        if run is not None:
            raise ConfigError(f"work.run={run}: is for work.do=drop and requeue; leave it out")
        return whole[verb](folder)
    entries = read_entries(folder)
    if verb == "drop":
        return _drop(folder, find_runs(entries, run))
    if run is not None:
        return _requeue(folder, find_runs(entries, run))
    line, hosts = _requeue(folder, [e for e in entries if e.outcome == "failed"]), readmit_hosts(folder)
    return line + f"; hosts let back: {', '.join(hosts)}" * bool(hosts)


def find_runs(entries: Sequence[Entry], name: str | int | None) -> list[Entry]:
    """Return the jobs that a name means: a number, the name of a run folder, or words that they all have.

    Raises:
        ConfigError: there is none.
    """
    if isinstance(name, int):
        found = [entry for entry in entries if entry.number == name]
    else:
        words = set((name or "").split())
        found = [
            entry for entry in entries if name and (name == name_run(entry) or words <= {*entry.overrides})
        ]
    if not found:
        shown = [f"{entry.number} ({' '.join(entry.overrides)})" for entry in entries[:LISTED]]
        rest = f", ... (task=status lists {len(entries)})" if len(entries) > LISTED else ""
        said = ": missing" if name is None else f"={name}: names no run of this sweep"
        raise ConfigError(f"work.run{said}; choose from {', '.join(shown)}{rest}")
    return found


def name_run(entry: Entry) -> str | None:
    """Return the name of the folder of a job's run; None while it has none."""
    own = entry.folder or next(iter(entry.samples), None)
    return None if own is None else Path(own).name


def read_hold(folder: Path, since: float = 0.0) -> Literal["pause", "stop"] | None:
    """Return what workers of a sweep are to do instead of work; None if nothing.

    Args:
        folder: the sweep's.
        since: when the worker began, by the file system's clock.
    """
    path = folder / HELD
    try:
        if path.read_text(encoding="utf-8").strip() != STOP:
            return "pause"
        return "stop" if path.stat().st_mtime > since else None
    except FileNotFoundError:
        return None


def _pause(folder: Path) -> str:
    known = read_hold(folder) == "pause"
    write_whole(folder / HELD, "")
    said = "is paused already" if known else "paused: workers stop after their blocks"
    return f"{folder}: {said}; work.do=resume lets them go on"


def _resume(folder: Path) -> str:
    if read_hold(folder) != "pause":
        return f"{folder}: is not paused"
    (folder / HELD).unlink(missing_ok=True)
    return f"{folder}: resumed"


def _stop(folder: Path) -> str:
    write_whole(folder / HELD, f"{STOP}\n")
    return f"{folder}: stopped: workers end after their blocks; the command that started them goes on with the rest"


def _drop(folder: Path, entries: Sequence[Entry]) -> str:
    for entry in entries:
        drop_of(folder, entry.number).touch()
    return f"{folder}: dropped {_describe(entries)}; work.do=requeue with the same work.run brings it back"


def _requeue(folder: Path, entries: Sequence[Entry]) -> str:
    tried = [entry for entry in entries if entry.outcome in ("failed", "dropped")]
    for entry in tried:
        drop_of(folder, entry.number).unlink(missing_ok=True)
        if entry.error is not None:
            forget(folder, entry.number)
    note_requeue(folder)
    return f"{folder}: requeued {_describe(tried)}"


def _describe(entries: Sequence[Entry]) -> str:
    if len(entries) == 1:
        return f"1 run ({' '.join(entries[0].overrides)})"
    return f"{len(entries)} runs" if entries else "nothing: no run failed"
