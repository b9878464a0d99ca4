"""Cache of finished calls: a repeated call returns its results without importing torch.

A full call finds a finished run by the hashes of weights, prompts, calibration and images. The cache compares sizes and
times of the files instead; if any differs, the full call is made.
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

VARIABLE_PREFIXES = ("HOME", "KVBENCH_", "HF_", "TORCH_HOME")
"""Prefixes of environment variables that locate weights."""


@dataclass(frozen=True)
class _Call:
    """Path of the run in `runs_dir`, and the state of everything that the call depends on."""

    folder: str
    stamps: Mapping[str, str]
    packages: Mapping[str, bool]


def recall(runs_dir: Path, config: Mapping[str, object], method: str) -> Outcome | None:
    """Return the outcome of an earlier equal call if nothing that it depends on has changed.

    Raises:
        ConfigError: the run's results are damaged.
    """
    try:
        call = read_fields(_Call, parse_json(_path(runs_dir, config, method).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None
    if any(_stamp(Path(path)) != stamp for path, stamp in call.stamps.items()):
        return None
    if any((find_spec(name) is not None) != known for name, known in call.packages.items()):
        return None
    folder = runs_dir / call.folder
    return Outcome(folder, read_results(folder), reused=True)


def remember(job: "Job", outcome: Outcome, *used: Path | None) -> None:
    """Write a finished call to `runs_dir` for `recall`, unless it has a logger or a metric failed.

    `used` are the calibration or order file of its method, and its codebooks; None is ignored.
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
        *(_watch_path(path) for one in evaluators for weight in one.weights for path in weight.candidates),
    ]
    packages = {name for one in evaluators for name in one.packages}
    call = _Call(
        str(outcome.folder.relative_to(job.settings.runs_dir)),
        {str(path.absolute()): _stamp(path) for path in watched},
        {name: find_spec(name) is not None for name in sorted(packages)},
    )
    path = _path(job.settings.runs_dir, job.config, job.method_name)
    write_whole(path, json.dumps(asdict(call), indent=1) + "\n")


def _path(runs_dir: Path, config: Mapping[str, object], method: str) -> Path:
    variables = {name: value for name, value in os.environ.items() if name.startswith(VARIABLE_PREFIXES)}
    return runs_dir / ".calls" / f"{hash_values([config, method, str(Path.cwd()), variables])[:16]}.json"


def _stamp(path: Path) -> str:
    """Return a hash of the names, sizes and times of a file or a folder's files; empty if the path does not exist.

    Hidden files, which are claims and unfinished files, are left out.
    """
    if not path.exists():
        return ""
    files = sorted(path.rglob("[!.]*")) if path.is_dir() else [path]
    states = [(str(file.relative_to(path)), file.stat()) for file in files if file.is_file()]
    return hash_values([(name, state.st_size, state.st_mtime_ns) for name, state in states])


def _watch_path(candidate: Path) -> Path:
    """Return the path whose stamp changes when a searched file or folder appears."""
    in_hub = candidate.parent.name == "snapshots"  # a download adds a folder there
    return candidate.parent.parent if in_hub else candidate


def _named_files(config: Mapping[str, object]) -> Iterator[Path]:
    """Yield existing files and folders named in a configuration: weights, prompts, order files, datasets."""
    for group in config.values():
        if isinstance(group, Mapping):
            yield from (path for path in map(resolve_path, _find(group)) if path.exists())


def _find(node: object, key: str | None = None) -> Iterator[str]:
    """Yield all strings below a node of a configuration, or only the strings under one key."""
    items = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    for name, value in items:
        if isinstance(value, str) and value and key in (None, name):
            yield value
        yield from _find(value, key)


def _source_files(packages: set[str]) -> Iterator[Path]:
    """Yield the files of all imported modules of some packages."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in packages and (file := getattr(module, "__file__", None)):
            yield Path(file)
