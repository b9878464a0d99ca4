"""Results of finished runs, with their references and the bounds of these references.

Damaged runs are left out, and a warning names each; so are runs of an earlier version.
"""

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvbench.core.config import ConfigError
from kvbench.runs.record.earlier import EarlierRun, list_earlier, note_earlier
from kvbench.runs.record.results import FILE, Results
from kvbench.runs.record.samples import read_finished

log = logging.getLogger(__name__)


def collect_runs(runs_dir: Path) -> list[Results]:
    """Read the results of every finished run under `runs_dir`; a warning names runs of an earlier version."""
    if note := note_earlier(list_earlier(runs_dir)):
        log.warning(note)
    return read_runs(path.parent for path in sorted(runs_dir.glob(f"*/*/{FILE}")))


def read_runs(folders: Iterable[Path]) -> list[Results]:
    """Read the results of run folders, each once; unfinished runs are left out."""
    return [run for _, run in _read_pairs(dict.fromkeys(folders))]


def read_with_references(folders: Sequence[Path]) -> list[Results]:
    """Read the results of run folders and of their references."""
    pairs = _read_pairs(dict.fromkeys(folders))
    references = [folder.parent / (run.reference or run.run) for folder, run in pairs]
    return read_runs([*(folder for folder, _ in pairs), *references])


def read_with_bounds(folders: Sequence[Path]) -> list[Results]:
    """Read the results of run folders, and of the bounds of their references (`task=bounds`)."""
    pairs = _read_pairs(dict.fromkeys(folders))
    references = {(folder.parent, run.reference or run.run) for folder, run in pairs}
    bounds = [
        folder
        for parent in sorted({parent for parent, _ in references})
        for folder, run in _read_pairs(sorted(parent.glob("full-*")))
        if (parent, run.reference) in references
    ]
    return read_runs([*(folder for folder, _ in pairs), *bounds])


def _read_pairs(folders: Iterable[Path]) -> list[tuple[Path, Results]]:
    pairs = []
    for folder in folders:
        try:
            run = read_finished(folder)
        except EarlierRun:
            continue
        except ConfigError as error:
            log.warning("left out: %s", error)
            continue
        if run is not None:
            pairs.append((folder, run))
    return pairs
