"""Checks of a composed configuration; imports only the classes that it names."""

import re
from collections.abc import Mapping
from fnmatch import fnmatch
from inspect import isabstract

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf

from kvbench.core.config import ConfigError, import_target, read_count, show
from kvbench.core.files import find_obstacle
from kvbench.core.settings import READING_TASKS, Settings

REQUIRED_ATTRIBUTES: Mapping[str, tuple[str, ...]] = {
    "model": ("spec", "load", "generate"),
    "method": ("needs", "prepare", "keep"),
    "prompts": ("load", "load_others"),
    "eval": ("metrics", "run"),
    "logger": ("send", "send_sweep"),
}
"""Attributes that the class of each group's object must have; `eval` holds any number of objects."""


def check_kinds(values: Mapping[str, object]) -> None:
    """Check that every group holds an object of its kind and that the model's name is valid.

    Raises:
        ConfigError: a group holds another object, or the name is not valid; the message names the key.
    """
    for group in ("model", "method", "prompts"):
        check_kind(values.get(group), group, group)
    evaluators = values.get("eval") or {}
    if not isinstance(evaluators, Mapping):
        raise ConfigError(f"eval={show(evaluators)}: not a group of evaluators; set eval=none for none")
    for name, node in evaluators.items():
        check_kind(node, f"eval.{name}", "eval")
    if values.get("logger"):
        kind = check_kind(values["logger"], "logger", "logger")
        if (check := getattr(kind, "check_installed", None)) is not None:
            check()
    model = values["model"]
    assert isinstance(model, Mapping)
    name = model.get("name")
    if not isinstance(name, str) or not re.fullmatch(r"\w[^/\0\n]{0,99}", name):
        raise ConfigError(
            f"model.name={show(name)}: must be a folder name: up to 100 characters without a slash, a letter or "
            "digit first"
        )


def check_preset(values: Mapping[str, object]) -> None:
    """Check that the choice of `sampling` is for the model; `*` in its name patterns matches any string.

    Raises:
        ConfigError: the choice is for other models.
    """
    preset, model = values.get("sampling"), values.get("model")
    if not isinstance(model, Mapping):
        return
    if not isinstance(preset, Mapping) or preset.keys() != {"name", "models"}:
        raise ConfigError(f"sampling={show(preset)}: must be a choice of conf/sampling, as --help lists them")
    name, models = model.get("name"), preset["models"]
    if not any(fnmatch(str(name), str(pattern)) for pattern in models):
        raise ConfigError(
            f"sampling={preset['name']}: is for model={', '.join(models)}, not {name}; choose another, or set "
            "model.sampling.* by hand"
        )


def check_kind(node: object, key: str, group: str) -> type:
    """Return the class of a group's node.

    Raises:
        ConfigError: the node names no class of the group's kind.
    """
    path = node.get("_target_") if isinstance(node, Mapping) else None
    if not isinstance(path, str):
        raise ConfigError(
            f"{key}._target_={show(path)}: not a class; choose with {group}= from the choices in --help"
        )
    if isinstance(node, Mapping) and node.get("_partial_"):
        raise ConfigError(f"{key}._partial_={show(node['_partial_'])}: must be left out")
    target, names = import_target(path, key), REQUIRED_ATTRIBUTES[group]
    attributes = {*dir(target), *getattr(target, "__dataclass_fields__", ())}
    if (
        not isinstance(target, type)
        or getattr(target, "_is_protocol", False)
        or isabstract(target)
        or not attributes.issuperset(names)
    ):
        raise ConfigError(f"{key}._target_={path}: set {group}= for a concrete class with {', '.join(names)}")
    return target


def check_hydra(node: DictConfig) -> None:
    """Check the keys of Hydra's own configuration, which added files may set too.

    Hydra would call any class or function as a callback.

    Raises:
        ConfigError: a key has a wrong value; the message names the key.
    """
    if node.callbacks:
        raise ConfigError(
            f"hydra.callbacks={show(OmegaConf.to_container(node.callbacks))}: must stay as in conf/config.yaml; write "
            "a logger (docs/extending.md) instead"
        )
    if not isinstance(node.verbose, bool | str | ListConfig):
        raise ConfigError(
            f"hydra.verbose={show(node.verbose)}: must be true, false or one or more logger names"
        )
    if not isinstance(node.launcher, DictConfig) or node.launcher.get("_target_") is None:
        raise ConfigError("hydra.launcher: must be a group of keys; choose with hydra/launcher=")


def count_processes(cfg: DictConfig) -> int:
    """Return the number of processes that share the model (`model.tensor_parallel`), all of them started.

    Raises:
        ConfigError: a different number of processes was started, or the task is for one process.
    """
    node = OmegaConf.select(cfg, "model.tensor_parallel", default=1)
    count = node if type(node) is int and node > 0 else 1  # values of a wrong type are refused later
    started, _, _ = read_count("WORLD_SIZE", 1), read_count("RANK", 0), read_count("LOCAL_RANK", 0)
    key = f"model.tensor_parallel={count}"
    for name in ("heads", "kv_heads", "hidden"):
        size = OmegaConf.select(cfg, f"model.transformer.{name}", default=0)
        if type(size) is int and size % count:
            raise ConfigError(f"{key}: must divide model.transformer.{name}={size}")
    if count != started:
        start = (
            f"torchrun --nproc-per-node {count} run.py ... {key}" if count > 1 else f"python run.py ... {key}"
        )
        raise ConfigError(f"{key}: started as {started} process{'es' * (started > 1)}; start it as `{start}`")
    if count > 1 and cfg.task != "run":
        raise ConfigError(f"{key}: task={cfg.task} is for one process; set model.tensor_parallel=1")
    if count > 1 and HydraConfig.get().mode is RunMode.MULTIRUN:
        raise ConfigError(f"{key}: start each run of a sweep separately, without -m")
    return count


def check_runs_dir(settings: Settings, *, alone: bool = False) -> None:
    """Check that the output folder is writable, without creating it.

    A run `alone`, outside a sweep, may be finished in a read-only folder: `kvbench.runs.execute.run` decides.

    Raises:
        ConfigError: the folder is not writable.
    """
    if alone and settings.task == "run" and settings.runs_dir.is_dir():
        return
    if settings.task not in ("plan", "check") and (problem := find_obstacle(settings.writes)) is not None:
        key, hint = "runs_dir", "; output=... names another folder" * (settings.task in READING_TASKS)
        if settings.writes != settings.runs_dir:
            key, hint = "output", ""
        raise ConfigError(f"{key}={settings.writes}: cannot be written ({problem}){hint}")
