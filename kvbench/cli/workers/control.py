"""Control of a running sweep by files in its folder, which workers read between two blocks: markers and stopped hosts.

A host is stopped when consecutive runs failed there for no fault of their settings.
"""

import errno
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from kvbench.cli.config.messages import is_expected
from kvbench.cli.sweeps.jobs import forget, note_requeue, write_entry
from kvbench.core.config import ConfigError
from kvbench.core.files import parse_json, read_bytes, read_text, write_whole
from kvbench.runs.record.sweeps import JobStatus, drop_of, read_entries, read_entry

HELD = "held"
"""Marker file. Empty: workers pause. With `STOP`: workers started before it end."""
STOP = "stop"
MAX_LISTED = 8
"""Maximum number of runs that an error message lists."""
HOSTS = "hosts"
"""Subfolder of a sweep's folder with the stopped hosts."""
MAX_FAILURES = 2
"""Consecutive failures after which a host is stopped."""
HOST_ERRORS = (
    errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENODEV,
)  # fmt: skip
"""`errno` values caused by the host, not by a setting."""


def control(folder: Path, verb: str, run: str | int | None = None) -> str:
    """Carry out `work.do` on a sweep and return a line about the result.

    Args:
        folder: folder of the sweep.
        verb: `pause`, `resume`, `stop`, `requeue` or `drop`.
        run: name of runs, see `find_runs`; None for all failed runs and stopped hosts.

    Raises:
        ConfigError: no run has the name, or the verb takes no run.
    """
    if verb in ("pause", "resume", "stop"):
        if run is not None:
            raise ConfigError(f"work.run={run}: only for work.do=drop and work.do=requeue; leave it out")
        return f"{folder}: {_hold(folder, verb)}"
    entries = read_entries(folder)
    if verb == "drop":
        dropped = find_runs(entries, run)
        for entry in dropped:
            drop_of(folder, entry.number).touch()
        return (
            f"{folder}: dropped {_describe(dropped)}; work.do=requeue with the same work.run brings it back"
        )
    if run is not None:
        return _requeue(folder, find_runs(entries, run))
    line, hosts = _requeue(folder, [e for e in entries if e.outcome == "failed"]), readmit_hosts(folder)
    return line + f"; hosts readmitted: {', '.join(hosts)}" * bool(hosts)


def find_runs(entries: Sequence[JobStatus], name: str | int | None) -> list[JobStatus]:
    """Return the jobs with an index, the name of a run folder, or some of their overrides, separated by spaces.

    Raises:
        ConfigError: no job matches.
    """
    if isinstance(name, int):
        matches = [entry for entry in entries if entry.number == name]
    else:
        words = set((name or "").split())
        matches = [
            entry for entry in entries if name and (name == name_run(entry) or words <= {*entry.overrides})
        ]
    if not matches:
        shown = [f"{entry.number} ({' '.join(entry.overrides)})" for entry in entries[:MAX_LISTED]]
        rest = f", ... (task=status lists {len(entries)})" if len(entries) > MAX_LISTED else ""
        problem = ": missing" if name is None else f"={name}: names no run of this sweep"
        raise ConfigError(f"work.run{problem}; choose from {', '.join(shown)}{rest}")
    return matches


def name_run(entry: JobStatus) -> str | None:
    """Return the name of the folder of a job's run; None while it has none."""
    own = entry.folder or next(iter(entry.samples), None)
    return None if own is None else Path(own).name


def read_hold(folder: Path, since: float = 0.0) -> Literal["pause", "stop"] | None:
    """Return whether workers of a sweep have to pause or stop; None if neither.

    Args:
        folder: folder of the sweep.
        since: start of the worker, by the file system's clock.
    """
    path = folder / HELD
    try:
        if read_text(path, errors="replace").strip() != STOP:
            return "pause"
        return "stop" if path.stat().st_mtime > since else None
    except FileNotFoundError:
        return None


def _hold(folder: Path, verb: str) -> str:
    """Pause, resume or stop the workers of a sweep and return its state."""
    was_paused = read_hold(folder) == "pause"
    if verb == "pause":
        write_whole(folder / HELD, "")
        state = "is paused already" if was_paused else "paused: workers stop after their blocks"
        return f"{state}; resume with work.do=resume"
    if verb == "stop":
        write_whole(folder / HELD, f"{STOP}\n")
        return "stopped: workers end after their blocks; run the command that started them again to resume"
    if was_paused:
        (folder / HELD).unlink(missing_ok=True)
    return "resumed" if was_paused else "is not paused"


def _requeue(folder: Path, entries: Sequence[JobStatus]) -> str:
    requeued = [entry for entry in entries if entry.outcome in ("failed", "dropped")]
    for entry in requeued:
        drop_of(folder, entry.number).unlink(missing_ok=True)
        if entry.error is not None:
            forget(folder, entry.number)
    note_requeue(folder)
    return f"{folder}: requeued {_describe(requeued)}"


def _describe(entries: Sequence[JobStatus]) -> str:
    if len(entries) == 1:
        return f"1 run ({' '.join(entries[0].overrides)})"
    return f"{len(entries)} runs" if entries else "nothing: no run failed"


def blames_host(error: Exception) -> bool:
    """Return whether the host may have caused an error: disk, memory, driver, or anything that no user can cause."""
    fault = getattr(error, "errno", None) in HOST_ERRORS or type(error).__name__ == "OutOfMemoryError"
    return fault or not is_expected(error)


def stop_host(folder: Path, host: str, reason: str, failures: Sequence[tuple[int, tuple[str, ...]]]) -> str:
    """Stop all workers of a host for a reason, free its failed jobs for other hosts, and return a message."""
    write_whole(folder / HOSTS / f"{host}.json", json.dumps({"reason": reason}) + "\n")
    for number, overrides in failures:
        if (entry := read_entry(folder, number, overrides)).outcome == "failed":
            write_entry(folder, replace(entry, outcome="missing"))
    note_requeue(folder)
    return describe_host(host, reason)


def read_stopped_hosts(folder: Path) -> dict[str, str]:
    """Return the reason of each stopped host of a sweep, by host, in alphabetical order."""
    return {path.stem: _read_reason(path) for path in sorted((folder / HOSTS).glob("*.json"))}


def _read_reason(path: Path) -> str:
    try:
        return str(parse_json(read_bytes(path))["reason"])
    except (ValueError, KeyError, TypeError):
        return f"a reason that cannot be read ({path} is damaged)"


def readmit_hosts(folder: Path) -> list[str]:
    """Let all stopped hosts work again; return their names."""
    hosts = list(read_stopped_hosts(folder))
    for host in hosts:
        (folder / HOSTS / f"{host}.json").unlink(missing_ok=True)
    return hosts


def describe_host(host: str, reason: str) -> str:
    """Return one line that names a stopped host, the reason and the remedy."""
    return (
        f"host {host} is stopped: {MAX_FAILURES} runs in a row failed there, the last with {reason}; repair it, then "
        "work.do=requeue and start workers"
    )
