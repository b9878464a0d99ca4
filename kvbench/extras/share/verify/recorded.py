"""Jobs of recorded runs: objects of a stored configuration, with classes of kvbench or of code that the user names."""

import json
import sys
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, is_dataclass, replace
from inspect import isclass, isfunction
from pathlib import Path
from typing import Any

from kvbench.cli.tasks.job import build_job
from kvbench.core.config import ConfigError, import_target, list_nodes
from kvbench.core.settings import Settings
from kvbench.extras.share.verify.named_files import (
    GETTER,
    hide_reasons,
    place_files,
    place_weights,
)
from kvbench.methods.shared.base import Method
from kvbench.models.base import Model
from kvbench.runs.check import check_job
from kvbench.runs.job import Job
from kvbench.runs.record.results import Results

PACKAGES = tuple(f"kvbench.{name}." for name in ("eval", "methods", "models", "prompts", "scenes"))
"""Packages whose classes and functions a stored configuration may name."""
MAX_METRICS = 64
"""Maximum number of a record's evaluators that are computed again."""
UNUSED = ("train", "logger", "sweeps", "sampling", "protect", "windows")
"""Groups whose nodes are not made into objects."""
OWN_KEYS: Mapping[str, object] = {
    "task": "run", "runs_dirs": [], "require": [], "from": None, "published": None, "against": None, "output": None,
    "shard": {}, "work": {}, "sweep": {},
}  # fmt: skip
"""Keys that concern the call and do not affect a sample, with the values of a verification."""


@dataclass
class RecordedJobs:
    """Maker of the jobs of recorded runs.

    Attributes:
        runs_dir: folder for calibrations.
        code: top-level packages and modules, beside kvbench, whose code may be run.
        weights: the user's folder of weights and other files, see `place_weights` and `place_files`; None without one.
    """

    runs_dir: Path
    code: Sequence[str] = ()
    weights: Path | None = None

    def __call__(self, results: Results) -> tuple[Job, list[str]]:
        """Return the checked job of a record, with the evaluators that it names, and the keys of the user's files.

        Raises:
            ConfigError: the record names code that may not be run, a file that may not be read, a missing class or
                file, or too many evaluators. Contents of the user's files are not quoted.
            ValueError: the job does not fit, see `check_job`.
        """
        if (count := len(results.evaluated)) > MAX_METRICS:
            raise ConfigError(
                f"results.json: names {count} evaluators, {MAX_METRICS} at most are computed again"
            )
        kept = {key: value for key, value in results.config.items() if key not in UNUSED}
        kept |= {"eval": {name: entry.settings for name, entry in results.evaluated.items()}}
        values: dict[str, Any] = deepcopy(kept) | {**OWN_KEYS, "runs_dir": str(self.runs_dir)}
        parts = {key: values.get(key) for key in ("model", "method", "prompts")}
        parts |= {f"eval.{name}": node for name, node in values["eval"].items()}
        for key, node in parts.items():
            check_targets(node, key, self.code)
        if "tensor_parallel" in values["model"]:
            values["model"]["tensor_parallel"] = 1
        place_weights(values["model"], self.weights)
        user_keys = place_files(values, self.weights)
        settings = Settings.of(values)
        with hide_reasons(user_keys):
            job = build_job(values, settings, results.method, values, keep_model=True)
            check_job(job)
        bound = {bound.method_name: bound for bound in job.bounds()}.get(results.method)
        return job if bound is None else replace(bound, evaluators=job.evaluators), user_keys


def check_targets(node: object, key: str, code: Sequence[str]) -> None:
    """Check that a stored group of keys names classes of kvbench, or of code that the user named.

    A module also gives access to its imports, `kvbench.models.next_token.torch.load`, so the defining module counts.

    Raises:
        ConfigError: `node` is not a group of keys, names other code, or contains an interpolation, which could read
            this machine's environment, or positional arguments, which have no key to check.
    """
    if not isinstance(node, dict):  # OmegaConf parses a string as YAML, with classes that were not checked
        raise ConfigError(f"{key}: must be a group of keys; publish the run again, or leave it out")
    for _, inner in list_nodes(node):
        target = inner["_target_"]
        name, is_called = (inner.get("path"), False) if target == GETTER else (target, True)
        if not _is_trusted(name, code):
            raise ConfigError(
                f"{key}._target_={name}: code that is not kvbench's is not run; name it with "
                f"code={str(name).partition('.')[0]} if you trust it"
            )
        imported: Any = import_target(str(name), key)
        is_part = isclass(imported) and (is_dataclass(imported) or issubclass(imported, Method | Model))
        is_right = is_part if is_called else isfunction(imported)
        if not (is_right and _is_trusted(f"{imported.__module__}.{imported.__qualname__}", code)):
            kind = "method, model, or dataclass of settings" if is_called else "function"
            raise ConfigError(
                f"{key}._target_={name}: is not run; it is not a {kind} that kvbench or named code defines"
            )
    if any("_args_" in inner for _, inner in list_nodes(node)):
        raise ConfigError(f"{key}._args_: a stored configuration has arguments by key alone; remove it")
    if "${" in json.dumps(node):
        raise ConfigError(
            f"{key}: contains an interpolation (${{...}}), which a stored configuration never has"
        )


def _is_trusted(name: object, code: Sequence[str]) -> bool:
    """Return whether a dotted name begins with a package of kvbench or with a name that the user gave."""
    top = str(name).partition(".")[0]
    return isinstance(name, str) and (
        name.startswith(PACKAGES) or top in set(code) - {"hydra", "kvbench"} - sys.stdlib_module_names
    )
