"""Runs of an earlier version of kvbench, which stay on disk, are listed by name and are read no further.

Schema 1 of results.json is theirs, and a provenance.json without a schema, which a run has before its results.
"""

import re
from pathlib import Path

from kvbench.core.config import ConfigError
from kvbench.core.files import open_file
from kvbench.runs.record.origins import read_provenance

SCHEMA_VERSION = 2
"""Schema version of results.json and provenance.json (docs/results_schema.md)."""
OF_EARLIER_VERSION = "of an earlier version"
"""State of such a run in lists of runs."""
_FIRST_SCHEMA = re.compile(rb'\s*\{\s*"schema_version": 1,')


class EarlierRun(ConfigError):
    """An earlier version wrote a run's results; the message names the file and the remedy."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"{path}: {OF_EARLIER_VERSION}, which this one does not read; run it again: it gets a folder of its own"
        )


def is_earlier(folder: Path) -> bool:
    """Return whether a run's folder was written by an earlier version, finished or not."""
    try:
        with open_file(folder / "results.json") as file:
            return _FIRST_SCHEMA.match(file.read(64)) is not None
    except OSError:
        pass
    provenance = read_provenance(folder) or {}
    return "started" in provenance and "schema_version" not in provenance


def list_earlier(runs_dir: Path) -> list[Path]:
    """Return the folders of runs of an earlier version in a folder of runs, in order."""
    return [folder for folder in sorted(runs_dir.glob("*/*/")) if is_earlier(folder)]


def note_earlier(folders: list[Path]) -> str:
    """Return a line with the names of runs of an earlier version; empty if there are none."""
    names = ", ".join(f"{folder.parent.name}/{folder.name}" for folder in folders)
    return f"{OF_EARLIER_VERSION}, left out: {names}" if folders else ""
