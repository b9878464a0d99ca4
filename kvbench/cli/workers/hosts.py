"""Hosts of a sweep that were stopped, one small file each: machines on which runs broke that no setting explains."""

import errno
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kvbench.cli.config.messages import is_expected
from kvbench.cli.sweeps.jobs import note_requeue, read_entry, write_entry
from kvbench.core.files import parse_json, write_whole

FOLDER = "hosts"
"""Folder of these files in that of a sweep."""
MAX_BROKEN = 2
"""Jobs that may break in a row on a host: then it is the host."""
REMEDY = "mend it, then work.do=requeue and start workers"
"""Remedy for the fault."""
MAX_HOSTS = 3
"""Hosts that may be stopped for the same reason: then it is the sweep."""
FAULTS = (
    errno.EIO,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.ESTALE,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENODEV,
)
"""Errors of the system that are a machine's, not a setting's."""


def blames_host(error: Exception) -> bool:
    """Return whether an error may be the machine's: a full or broken disk, memory, a driver, anything unexplained."""
    fault = getattr(error, "errno", None) in FAULTS or type(error).__name__ == "OutOfMemoryError"
    return fault or not is_expected(error)


def stop_host(folder: Path, host: str, reason: str, broken: Sequence[tuple[int, tuple[str, ...]]]) -> str:
    """Have all workers of a host end, give its jobs back to workers of others, and return what to tell the user.

    Args:
        folder: the sweep's.
        host: name of the machine.
        reason: the last error.
        broken: numbers and overrides of the jobs that broke on it, one after another.
    """
    write_whole(folder / FOLDER / f"{host}.json", json.dumps({"reason": reason}) + "\n")
    for number, overrides in broken:
        if (entry := read_entry(folder, number, overrides)).outcome == "failed":
            write_entry(folder, replace(entry, outcome="missing"))
    note_requeue(folder)
    stopped = read_stopped_hosts(folder)
    return describe_stop(stopped) or describe_host(host, reason)


def read_stopped_hosts(folder: Path) -> dict[str, str]:
    """Return the hosts that take no work of a sweep, and why."""
    paths = sorted((folder / FOLDER).glob("*.json"))
    return {path.stem: parse_json(path.read_text())["reason"] for path in paths}


def readmit_hosts(folder: Path) -> list[str]:
    """Let all hosts take work of a sweep again; return their names."""
    hosts = list(read_stopped_hosts(folder))
    for host in hosts:
        (folder / FOLDER / f"{host}.json").unlink(missing_ok=True)
    return hosts


def describe_host(host: str, reason: str) -> str:
    """Return in one line that a host was stopped, why, and what to do."""
    broke = f"{MAX_BROKEN} runs in a row broke there, the last with {reason}"
    return f"host {host} takes no more work: {broke}; {REMEDY}"


def describe_stop(stopped: Mapping[str, str]) -> str | None:
    """Return in one line why a sweep was stopped, None if it was not: hosts failed alike, numbers aside."""
    alike: dict[str, list[str]] = {}
    for host, reason in stopped.items():
        alike.setdefault(re.sub(r"\d+", "#", reason), []).append(host)
    for hosts in alike.values():
        if len(hosts) >= MAX_HOSTS:
            return (
                f"the sweep is stopped: {', '.join(hosts)} failed alike, with {stopped[hosts[0]]}; {REMEDY}"
            )
    return None
