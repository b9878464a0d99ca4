"""Control of a running sweep by small files in its folder, which every worker reads between two blocks."""

from collections.abc import Sequence
from pathlib import Path

from kvbench.cli.hosts import readmit_hosts
from kvbench.cli.jobs import Entry, drop_of, forget, note_requeue, read_entries
from kvbench.core.config import ConfigError

PAUSED = "paused"
"""File in a sweep's folder while it is paused."""
STOPPED = "stopped"
"""File in a sweep's folder whose time is that of the last stop."""
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


def is_paused(folder: Path) -> bool:
    """Return whether workers of a sweep take no work."""
    return (folder / PAUSED).is_file()


def _pause(folder: Path) -> str:
    known = is_paused(folder)
    (folder / PAUSED).touch()
    said = "is paused already" if known else "paused: workers stop after their blocks"
    return f"{folder}: {said}; work.do=resume lets them go on"


def _resume(folder: Path) -> str:
    if not is_paused(folder):
        return f"{folder}: is not paused"
    (folder / PAUSED).unlink(missing_ok=True)
    return f"{folder}: resumed"


def is_stopped(folder: Path, since: float) -> bool:
    """Return whether workers of a sweep that began at a time, by the file system's clock, are to end."""
    path = folder / STOPPED
    return path.is_file() and path.stat().st_mtime > since


def _stop(folder: Path) -> str:
    (folder / STOPPED).touch()
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
