"""What became of a sweep's jobs: failures and run folders."""

import logging
from collections.abc import Sequence
from pathlib import Path

from kvbench.cli.config.messages import describe_error, is_expected
from kvbench.cli.console import CONSOLE
from kvbench.cli.sweeps.jobs import Entry

log = logging.getLogger(__name__)

UNTOLD = {
    "missing": "was not started; the same command goes on with it",
    "started": "did not come to its end: its process was killed, or still runs",
}
"""Error of jobs that ended without recording an outcome."""


def describe_failure(error: Exception) -> str:
    """Print and return, in one line, why a job of a sweep failed; the log gets the traceback where it is our fault."""
    if is_expected(error):
        line = describe_error(error)
    else:
        log.error("a job of the sweep broke", exc_info=error)
        line = f"{type(error).__name__}: {' '.join(str(error).split())}"
    CONSOLE.print(f"error: {line}", style="red", highlight=False, markup=False, soft_wrap=True)
    return line


def list_failures(entries: Sequence[Entry]) -> list[tuple[str, str]]:
    """Return which jobs of a sweep are not finished, and why."""
    return [
        (" ".join(entry.overrides), entry.error or UNTOLD[entry.outcome])
        for entry in entries
        if entry.outcome not in ("finished", "dropped")
    ]


def list_runs(entries: Sequence[Entry]) -> list[Path]:
    """Return the run folders of a sweep's jobs, each once; dropped jobs have none."""
    kept = [entry for entry in entries if entry.outcome != "dropped"]
    return list(dict.fromkeys(Path(entry.folder) for entry in kept if entry.folder))
