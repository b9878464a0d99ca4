"""Cache of finished calls: a repeated call is answered from its results without importing torch.

A full call finds a finished run by the hashes of its weights, prompts and calibration, and hashes its images. Here the
sizes and times of everything that these depend on are compared instead; after any difference the full call is made.
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.core.files import hash_values, parse_json, resolve_path, write_whole
from kvbench.eval.protocol.records import read_fields
from kvbench.runs.record.results import Outcome, read_results

if TYPE_CHECKING:  # imports torch
    from kvbench.runs.job import Job

ENVIRONMENT = ("HOME", "KVBENCH_", "HF_", "TORCH_HOME")
"""Prefixes of environment variables that locate weights."""


@dataclass(frozen=True)
class _Record:
    """Path of the run in `runs_dir`, and the state of everything that the call depends on."""

    folder: str
    stamps: Mapping[str, str]
    packages: Mapping[str, bool]


def recall(runs_dir: Path, config: Mapping[str, object], method: str) -> Outcome | None:
    """Find the run that the same call finished, if nothing that it depends on has changed since.

    Args:
        runs_dir: where runs lie.
        config: the resolved configuration, JSON values.
        method: name in `conf/method`.

    Raises:
        ConfigError: the run's results are damaged.
    """
    try:
        record = read_fields(_Record, parse_json(_path(runs_dir, config, method).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None
    if any(_stamp(Path(path)) != stamp for path, stamp in record.stamps.items()):
        return None
    if any(_installed(name) != there for name, there in record.packages.items()):
        return None
    folder = runs_dir / record.folder
    return Outcome(folder, read_results(folder), reused=True)


def remember(job: "Job", outcome: Outcome, *used: Path | None) -> None:
    """Write down a finished call beside the runs, for `recall`.

    A call is always made again when it is logged elsewhere or a metric failed.

    Args:
        job: what was asked for.
        outcome: the finished run.
        used: the calibration or order file of its method, its codebooks; None for what it does not use.
    """
    assert outcome.results is not None
    failed = any(one.status == "failed" for one in outcome.results.evaluated.values())
    if job.logger is not None or failed:
        return
    reference, evaluators = outcome.results.reference, list(job.evaluators.values())
    watched = [
        outcome.folder,
        *([] if reference is None else [outcome.folder.parent / reference]),
        *(path for path in used if path is not None),
        *_named_files(job.config),
        *_source_files({target.partition(".")[0] for target in _find(job.config, "_target_")} | {"kvbench"}),
        *(_place(path) for one in evaluators for weight in one.weights for path in weight.candidates),
    ]
    packages = {name for one in evaluators for name in one.packages}
    record = _Record(
        str(outcome.folder.relative_to(job.settings.runs_dir)),
        {str(path.absolute()): _stamp(path) for path in watched},
        {name: _installed(name) for name in sorted(packages)},
    )
    path = _path(job.settings.runs_dir, job.config, job.method_name)
    write_whole(path, json.dumps(asdict(record), indent=1) + "\n")


def _path(runs_dir: Path, config: Mapping[str, object], method: str) -> Path:
    variables = {name: value for name, value in os.environ.items() if name.startswith(ENVIRONMENT)}
    return runs_dir / ".calls" / f"{hash_values([config, method, str(Path.cwd()), variables])[:16]}.json"


def _stamp(path: Path) -> str:
    """Return names, sizes and times of a file or of a folder's files as one hash; empty when nothing is there.

    Hidden files are left out: they are locks, and parts of what is being written.
    """
    if not path.exists():
        return ""
    files = sorted(path.rglob("[!.]*")) if path.is_dir() else [path]
    states = [(str(file.relative_to(path)), file.stat()) for file in files if file.is_file()]
    return hash_values([(name, state.st_size, state.st_mtime_ns) for name, state in states])


def _place(candidate: Path) -> Path:
    """Return what changes when a file or folder that is looked for appears."""
    in_hub = candidate.parent.name == "snapshots"  # there a download is a new folder beside the others
    return candidate.parent.parent if in_hub else candidate


def _installed(package: str) -> bool:
    return find_spec(package) is not None


def _named_files(config: Mapping[str, object]) -> Iterator[Path]:
    """Yield what the groups of a configuration name and what exists: weights, prompts, order files, datasets."""
    for group in config.values():
        if isinstance(group, Mapping):
            yield from (path for path in map(resolve_path, _find(group)) if path.exists())


def _find(node: object, key: str | None = None) -> Iterator[str]:
    """Yield every string below a node of a configuration, or those under one key."""
    items = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    for name, value in items:
        if isinstance(value, str) and value and key in (None, name):
            yield value
        yield from _find(value, key)


def _source_files(packages: set[str]) -> Iterator[Path]:
    """Yield the files of the modules that were imported from some packages."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in packages and (file := getattr(module, "__file__", None)):
            yield Path(file)
