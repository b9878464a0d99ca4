"""Cache of finished calls: a repeated call returns its results without importing torch.

A full call finds a finished run by the hashes of weights, prompts, calibration and images. The cache compares sizes and
times of the files instead; if any differs, the full call is made.
"""

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from stat import S_ISDIR
from typing import TYPE_CHECKING

from kvbench.core.files import hash_values, parse_json, read_text, resolve_path, write_whole
from kvbench.core.imports import STARTED
from kvbench.core.source import find_spec
from kvbench.eval.protocol.records import read_fields
from kvbench.runs.code import describe_code, find_versions, identify_engine
from kvbench.runs.record.origins import read_digests
from kvbench.runs.record.results import Outcome, read_results

if TYPE_CHECKING:  # imports torch
    from kvbench.runs.job import Job

VARIABLE_PREFIXES = ("HOME", "KVBENCH_", "HF_", "TORCH_HOME")
"""Prefixes of environment variables that locate weights."""

_FileState = tuple[str, int, int, int]
"""Name, size, and times of modification and of change of a file."""


@dataclass(frozen=True)
class _Call:
    """Everything that the result of a finished call depends on.

    Attributes:
        folder: path of the run in `runs_dir`.
        stamps: state of each file and folder, by path.
        origins: file and folders of each package that was or would be imported, by top-level name.
        versions: versions of the packages whose code is not read, by name.
    """

    folder: str
    stamps: Mapping[str, str]
    origins: Mapping[str, str]
    versions: Mapping[str, str]


def recall(runs_dir: Path, config: Mapping[str, object], method: str) -> Outcome | None:
    """Return the finished run of an earlier equal call if nothing that it depends on has changed.

    Raises:
        ConfigError: the run's results are damaged.
    """
    try:
        call = read_fields(_Call, parse_json(read_text(_path(runs_dir, config, method))))
        if any(_stamp(Path(path)) != stamp for path, stamp in call.stamps.items()):
            return None
    except (OSError, ValueError):
        return None
    if any(_find_origin(name) != place for name, place in call.origins.items()):
        return None
    if call.versions and find_versions(call.versions) != call.versions:
        return None
    folder = runs_dir / call.folder
    results = read_results(folder)
    return None if results is None else Outcome(folder, results, reused=True)


def remember(job: "Job", outcome: Outcome) -> None:
    """Write a finished call to `runs_dir` for `recall`.

    Nothing is written if the job has a logger, if shards are missing or a metric failed, if the run was made by
    another engine, or if code, prompts or references changed after they were read or cannot be read.
    """
    if outcome.results is None or job.logger is not None:
        return
    failed = any(one.status == "failed" for one in outcome.results.evaluated.values())
    if failed or read_digests(outcome.folder).get("engine_sha256") != identify_engine():
        return
    from kvbench.runs.prepare import find_used_files  # imports torch, which `recall` does not need

    reference, evaluators = outcome.results.reference, list(job.evaluators.values())
    code = describe_code({*chain(*job.classes.values(), *job.evaluator_classes.values())})
    modules = [one for name, one in list(sys.modules.items()) if name.partition(".")[0] == "kvbench"]
    own = [Path(file) for module in modules if (file := getattr(module, "__file__", None))]
    sources = [*own, *(path for path, _ in code.sources.values() if path is not None)]
    inputs = _list_inputs(job, outcome.folder)
    watched = [
        outcome.folder,
        *([] if reference is None else [outcome.folder.parent / reference]),
        *(path for path in find_used_files(job) if path is not None),
        *inputs,
        *sources,
        *(_watch_path(path) for one in evaluators for weight in one.weights for path in weight.candidates),
    ]
    try:
        if _is_newer(sources, STARTED) or _is_newer(inputs, job.read_at):
            return
        stamps = {str(path): _stamp(path) for path in dict.fromkeys(path.absolute() for path in watched)}
    except OSError:  # a file disappeared or is unreadable
        return
    required = {name for one in evaluators for name in one.packages}
    tops = {name.partition(".")[0] for name in code.sources}
    origins = {name: _find_origin(name) for name in sorted({"kvbench", *required, *tops, *code.libraries})}
    folder = str(outcome.folder.relative_to(job.settings.runs_dir))
    call = _Call(folder, stamps, origins, find_versions(code.libraries))
    path = _path(job.settings.runs_dir, job.config, job.method_name)
    with suppress(OSError):  # the folder of a finished run may be read-only
        write_whole(path, json.dumps(asdict(call), indent=1) + "\n")


def _list_inputs(job: "Job", folder: Path) -> list[Path]:
    """Return the files and folders that a job reads, except calibrations: named files, prompts, references."""
    from kvbench.prompts.sets import CACHE  # its imports are not needed by `recall`

    references = [path for one in job.evaluators.values() for path in one.list_references(folder).values()]
    sections = [section for section in job.config.values() if isinstance(section, Mapping)]
    named = [resolve_path(text) for section in sections for text in _find(section)]
    existing = [path for path in named if os.path.exists(path)]  # noqa: PTH110 - a prompt is too long for Path.exists
    return [*existing, Path(CACHE).expanduser(), *(path for path in references if path is not None)]


def _path(runs_dir: Path, config: Mapping[str, object], method: str) -> Path:
    variables = {name: value for name, value in os.environ.items() if name.startswith(VARIABLE_PREFIXES)}
    # the settings of sweeps and reports do not affect a run
    own = {key: value for key, value in config.items() if key not in ("sweep", "report")}
    return runs_dir / ".calls" / f"{hash_values([own, method, str(Path.cwd()), variables])[:16]}.json"


def _is_newer(paths: Iterable[Path], since: int) -> bool:
    """Return whether a file, a folder or a file in it changed after a time in nanoseconds."""
    changes = (
        state[-1]
        for path in paths
        if path.exists()
        for state in (_describe("", path.stat()), *(_list_states(path, "") if path.is_dir() else ()))
    )
    return max(changes, default=0) > since


def _stamp(path: Path) -> str:
    """Return a hash of the names, sizes and times of a file or a folder's files; empty if the path does not exist.

    Hidden files, which are claims and unfinished files, are left out.
    """
    try:
        state = path.stat()
    except (OSError, ValueError):
        return ""
    if not S_ISDIR(state.st_mode):
        return _hash_states((_describe(".", state),))
    return _hash_states(tuple(sorted(_list_states(path, ""))))


@lru_cache(maxsize=8192)  # the jobs of a sweep depend on the same few hundred files
def _hash_states(states: tuple[_FileState, ...]) -> str:
    return hash_values(states)


def _list_states(folder: str | Path, prefix: str) -> Iterator[_FileState]:
    """Yield the states of the visible files in a folder and below; links to folders are not followed."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name[0] == ".":
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from _list_states(entry.path, f"{prefix}{entry.name}/")
            elif entry.is_file():
                yield _describe(prefix + entry.name, entry.stat())


def _describe(name: str, status: os.stat_result) -> _FileState:
    # The time of change differs even if a file is replaced by one of the same size with its time of modification.
    return name, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _watch_path(candidate: Path) -> Path:
    """Return the path whose stamp changes when a searched file or folder appears."""
    in_hub = candidate.parent.name == "snapshots"  # a download adds a folder to snapshots/
    return candidate.parent.parent if in_hub else candidate


def _find(node: object) -> Iterator[str]:
    """Yield all strings below a node of a configuration."""
    items = node.values() if isinstance(node, Mapping) else node if isinstance(node, list) else ()
    for value in items:
        if isinstance(value, str) and value:
            yield value
        yield from _find(value)


def _find_origin(package: str) -> str:
    """Return the file and folders that a package is or would be imported from, in one string; empty if not found."""
    spec = find_spec(package)
    return (
        "" if spec is None else os.pathsep.join([str(spec.origin), *(spec.submodule_search_locations or ())])
    )
