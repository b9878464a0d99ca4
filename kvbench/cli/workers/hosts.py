"""Stopped hosts of a sweep, one file each: machines on which consecutive runs failed for no fault of their settings."""

import errno
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kvbench.cli.config.messages import is_expected
from kvbench.cli.sweeps.jobs import note_requeue, read_entry, write_entry
from kvbench.core.files import parse_json, read_bytes, write_whole

FOLDER = "hosts"
"""Subfolder of a sweep's folder."""
MAX_FAILURES = 2
"""Consecutive failures after which a host is stopped."""
HOST_ERRORS = (
    errno.EIO,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.ESTALE,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENODEV,
)
"""`errno` values that are faults of the machine, not of a setting."""


def blames_host(error: Exception) -> bool:
    """Return whether the machine may have caused an error: disk, memory, driver, or anything that no user can cause."""
    fault = getattr(error, "errno", None) in HOST_ERRORS or type(error).__name__ == "OutOfMemoryError"
    return fault or not is_expected(error)


def stop_host(folder: Path, host: str, reason: str, failures: Sequence[tuple[int, tuple[str, ...]]]) -> str:
    """Stop all workers of a host for a reason, free its failed jobs for other hosts, and return a message."""
    write_whole(folder / FOLDER / f"{host}.json", json.dumps({"reason": reason}) + "\n")
    for number, overrides in failures:
        if (entry := read_entry(folder, number, overrides)).outcome == "failed":
            write_entry(folder, replace(entry, outcome="missing"))
    note_requeue(folder)
    return describe_host(host, reason)


def read_stopped_hosts(folder: Path) -> dict[str, str]:
    """Return the stopped hosts of a sweep and their reasons."""
    return {path.stem: _read_reason(path) for path in sorted((folder / FOLDER).glob("*.json"))}


def _read_reason(path: Path) -> str:
    try:
        return str(parse_json(read_bytes(path))["reason"])
    except (ValueError, KeyError, TypeError):
        return f"a reason that cannot be read ({path} is damaged)"


def readmit_hosts(folder: Path) -> list[str]:
    """Let all stopped hosts work again; return their names."""
    hosts = list(read_stopped_hosts(folder))
    for host in hosts:
        (folder / FOLDER / f"{host}.json").unlink(missing_ok=True)
    return hosts


def describe_host(host: str, reason: str) -> str:
    """Return one line that names a stopped host, the reason and the remedy."""
    return (
        f"host {host} is stopped: {MAX_FAILURES} runs in a row failed there, the last with {reason}; repair it, then "
        "work.do=requeue and start workers"
    )
