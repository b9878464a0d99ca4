"""Checks of the groups of a configuration; imports only what the configuration names."""

import re
from collections.abc import Mapping
from fnmatch import fnmatch
from inspect import isabstract

from kvbench.core.config import ConfigError, import_target, show

PARTS: Mapping[str, tuple[str, ...]] = {
    "model": ("spec", "load", "generate"),
    "method": ("needs", "prepare", "keep"),
    "prompts": ("load", "load_others"),
    "eval": ("metrics", "run"),
    "logger": ("send", "send_sweep"),
}
"""Attributes that the class of a group's object has; `eval` holds any number of objects."""


def check_kinds(values: Mapping[str, object]) -> None:
    """Make sure that every group holds what it is for, and that the model's name is one.

    Args:
        values: the resolved configuration, JSON values whose `_target_` can be imported.

    Raises:
        ConfigError: naming the key.
    """
    for group in ("model", "method", "prompts"):
        _check_kind(values.get(group), group, group)
    evaluators = values.get("eval") or {}
    if not isinstance(evaluators, Mapping):
        raise ConfigError(f"eval={show(evaluators)}: names no evaluators; eval=none for none")
    for name, node in evaluators.items():
        _check_kind(node, f"eval.{name}", "eval")
    if values.get("logger"):
        _check_kind(values["logger"], "logger", "logger")
    model = values["model"]
    assert isinstance(model, Mapping)
    _check_name(model.get("name"))


def check_protected(values: Mapping[str, object]) -> None:
    """Make sure that the group `protect`, which methods take their leading scales from, holds numbers of scales.

    Raises:
        ConfigError: naming the key.
    """
    protected = values.get("protect")
    if not isinstance(protected, Mapping):
        raise ConfigError(
            f"protect={show(protected)}: must be a group of keys (sinks, condensed, initial, leading)"
        )
    for name, scales in protected.items():
        mended_elsewhere = show(scales) == show(values.get("sinks"))  # the group takes them from there
        if not mended_elsewhere and (type(scales) is not int or scales < 0):
            raise ConfigError(f"protect.{name}={show(scales)}: must be a whole number of scales")


def check_preset(values: Mapping[str, object]) -> None:
    """Make sure that a file of `conf/sampling`, if one is chosen, is for the model.

    Args:
        values: the resolved configuration; `sampling.models` holds patterns of names, `*` for any letters.

    Raises:
        ConfigError: it is for other models.
    """
    preset, model = values.get("sampling"), values.get("model")
    if preset is None or not isinstance(model, Mapping):
        return
    if not isinstance(preset, Mapping) or preset.keys() != {"name", "models"}:
        raise ConfigError(f"sampling={show(preset)}: names no choice of conf/sampling")
    name, models = model.get("name"), preset["models"]
    if not any(fnmatch(str(name), str(pattern)) for pattern in models):
        raise ConfigError(
            f"sampling={preset['name']}: is for model={', '.join(models)}, not {name}; choose another, or set "
            "model.sampling.* by hand"
        )


def _check_kind(node: object, key: str, group: str) -> None:
    path = node.get("_target_") if isinstance(node, Mapping) else None
    if not isinstance(path, str):
        raise ConfigError(
            f"{key}._target_={show(path)}: names no class; choose with {group}=, as --help lists"
        )
    if isinstance(node, Mapping) and node.get("_partial_"):
        raise ConfigError(f"{key}._partial_={show(node['_partial_'])}: the object itself is needed")
    target, names = import_target(path, key), PARTS[group]
    given = {*dir(target), *getattr(target, "__dataclass_fields__", ())}
    if (
        not isinstance(target, type)
        or getattr(target, "_is_protocol", False)
        or isabstract(target)
        or not given.issuperset(names)
    ):
        raise ConfigError(f"{key}._target_={path}: not a class with {', '.join(names)}, as {group}= takes it")


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not re.fullmatch(r"\w[^/\0\n]{0,99}", name):
        raise ConfigError(
            f"model.name={show(name)}: names a folder in runs_dir: up to 100 characters, none of them a slash, and a "
            "letter or digit first"
        )
