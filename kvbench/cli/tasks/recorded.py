"""Jobs of recorded runs: objects of a stored configuration, with classes of kvbench or ones that the user names."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, is_dataclass, replace
from inspect import isclass, isfunction
from pathlib import Path
from typing import Any

from hydra.utils import get_object
from omegaconf import OmegaConf

from kvbench.cli.config.instantiate import instantiate
from kvbench.core.config import ConfigError
from kvbench.core.devices import use_device
from kvbench.core.files import hash_values, resolve_path
from kvbench.core.settings import Settings
from kvbench.kernels.batch_invariance import set_batch_invariant
from kvbench.methods.shared.base import Method
from kvbench.models.base import Model
from kvbench.runs.calibrate import choose_calibration
from kvbench.runs.job import Job, read_or_write
from kvbench.runs.record.results import Results
from kvbench.scenes.names import find_vocabulary

PACKAGES = tuple(f"kvbench.{name}." for name in ("eval", "methods", "models", "prompts", "scenes"))
"""Packages whose classes and functions a stored configuration may name."""
ASSETS = "pkg://kvbench/"
"""Place of files of names that a stored configuration may name."""
GETTER = "hydra.utils.get_method"
"""Function of Hydra that a configuration may name; it imports a function and does not call it."""
GROUPS = ("model", "method", "prompts", "eval")
"""Groups that a job's objects are made of."""
UNUSED = ("train", "logger", "sweeps", "sampling", "protect", "windows")
"""Groups of which no object is made."""
OWN: Mapping[str, object] = {
    "task": "run", "runs_dirs": [], "require": [], "from": None, "published": None, "against": None, "output": None,
    "shard": {}, "work": {}, "sweep": {},
}  # fmt: skip
"""Keys that concern the call and no sample."""


@dataclass
class RecordedJobs:
    """Maker of the jobs of recorded runs; the latest model is kept.

    Attributes:
        runs_dir: folder for calibrations.
        code: top-level packages and modules, beside kvbench, whose code may be run.
        weights: folder of weight files and files of names, for sources whose recorded path does not exist here.
    """

    runs_dir: Path
    code: Sequence[str] = ()
    weights: Path | None = None

    def __post_init__(self) -> None:
        self._models: dict[str, Model] = {}

    def __call__(self, results: Results, config: Mapping[str, object]) -> Job:
        """Return the job of a stored configuration.

        Raises:
            ConfigError: it names code that may not be run, or something that does not exist here.
        """
        values: dict[str, Any] = deepcopy({key: one for key, one in config.items() if key not in UNUSED})
        values |= {**OWN, "runs_dir": str(self.runs_dir)}
        values["eval"] = {name: deepcopy(entry.settings) for name, entry in results.evaluated.items()}
        for group in GROUPS:
            check_targets(values.get(group), group, self.code)
        self._find_weights(values["model"])
        for node in _list_nodes(values["model"]):
            if "captions" in node:
                node["captions"] = self._find_captions(node["captions"])  # type: ignore[index]
        settings = Settings.of(values)
        use_device(settings.device)
        set_batch_invariant(settings.batch_invariant)
        source = instantiate(OmegaConf.create(values["prompts"]))
        prompts = source.load()
        others = choose_calibration(settings.calibrate, source, prompts)
        job = Job(
            settings=settings,
            model=read_or_write(self._make_model(values["model"], settings.device), prompts, others),
            method=instantiate(OmegaConf.create(values["method"])),
            method_name=results.method,
            prompts=prompts,
            config=values,
            calibration_prompts=others,
            evaluators={name: instantiate(OmegaConf.create(one)) for name, one in values["eval"].items()},
        )
        bounds = {one.method_name: one for one in job.bounds()}
        bound = bounds.get(results.method)
        return job if bound is None else replace(bound, evaluators=job.evaluators)

    def _make_model(self, section: Mapping[str, Any], device: str) -> Model:
        key = hash_values([section, device])
        if key not in self._models:
            self._models.clear()
            self._models[key] = instantiate(OmegaConf.create(dict(section)))
        return self._models[key]

    def _find_weights(self, section: dict[str, Any]) -> None:
        """Replace recorded paths of weights that do not exist here by files of the user's folder."""
        if "tensor_parallel" in section:
            section["tensor_parallel"] = 1
        sources = section.get("sources")
        if self.weights is None or not isinstance(sources, dict):
            return
        for source in sources.values():
            path = source.get("path") if isinstance(source, dict) else None
            if isinstance(path, str) and not resolve_path(path).exists():
                source["path"] = str(self.weights / Path(path).name)

    def _find_captions(self, captions: object) -> str:
        """Return a file of names that may be read: of kvbench, or of the user's folder.

        Raises:
            ConfigError: it is another file, or no file of names. Its contents are not quoted.
        """
        found, text = "scenes", str(captions)
        if text.startswith(ASSETS) and ".." not in Path(text).parts:
            found = text
        elif captions != found:
            place = None if self.weights is None else self.weights / Path(text).name
            if place is None or not place.is_file():
                raise ConfigError(
                    f"model.captions={text:.80}: is not read; put the file into a folder and add weights=FOLDER"
                )
            found = str(place)
        try:
            find_vocabulary(found)
        except (OSError, ValueError):
            raise ConfigError(f"model.captions={text:.80}: is no file of names") from None
        return found


def check_targets(node: object, key: str, code: Sequence[str]) -> None:
    """Check that a stored group of keys names classes of kvbench, or of code that the user named.

    A module also gives what it imports, `kvbench.models.next_token.torch.load`, so the place of the definition counts.

    Raises:
        ConfigError: it names other code, or contains an interpolation, which could read this machine's environment.
    """
    for inner in _list_nodes(node):
        target = inner["_target_"]
        name, is_called = (inner.get("path"), False) if target == GETTER else (target, True)
        if not _is_trusted(name, code):
            raise ConfigError(
                f"{key}._target_={name}: code that is not kvbench's is not run; name it with "
                f"code={str(name).partition('.')[0]} if you trust it"
            )
        try:
            found = get_object(str(name))
        except Exception as error:  # a module may raise anything
            said = " ".join(str(error).split())
            raise ConfigError(f"{key}._target_={name}: cannot be imported ({said})") from None
        is_right = _is_part(found) if is_called else isfunction(found)
        if not (is_right and _is_trusted(f"{found.__module__}.{found.__qualname__}", code)):
            kind = "method, model, or dataclass of settings" if is_called else "function"
            raise ConfigError(
                f"{key}._target_={name}: is not run; it is no {kind} that kvbench or named code defines"
            )
    if _has_interpolation(node):
        raise ConfigError(
            f"{key}: contains an interpolation (${{...}}), which a stored configuration never has"
        )


def _is_trusted(name: object, code: Sequence[str]) -> bool:
    """Return whether a dotted name begins with a package of kvbench or with a name that the user gave."""
    top = str(name).partition(".")[0]
    return isinstance(name, str) and (
        name.startswith(PACKAGES) or top in set(code) - {"hydra", "kvbench"} - sys.stdlib_module_names
    )


def _is_part(one: object) -> bool:
    return isclass(one) and (is_dataclass(one) or issubclass(one, Method | Model))


def _list_nodes(value: object) -> Iterator[Mapping[Any, Any]]:
    """Yield the nodes of a configuration that have a `_target_`."""
    if isinstance(value, Mapping):
        if "_target_" in value:
            yield value
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _list_nodes(item)


def _has_interpolation(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_interpolation, [*value.keys(), *value.values()]))
    if isinstance(value, list | tuple):
        return any(map(_has_interpolation, value))
    return isinstance(value, str) and "${" in value
