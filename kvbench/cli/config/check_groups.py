"""Checks of the groups of a configuration; imports only the classes that it names."""

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from inspect import isabstract

from kvbench.core.config import ConfigError, import_target, show

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
        ConfigError: naming the key.
    """
    for group in ("model", "method", "prompts"):
        _check_kind(values.get(group), group, group)
    evaluators = values.get("eval") or {}
    if not isinstance(evaluators, Mapping):
        raise ConfigError(f"eval={show(evaluators)}: not a group of evaluators; set eval=none for none")
    for name, node in evaluators.items():
        _check_kind(node, f"eval.{name}", "eval")
    if values.get("logger"):
        _check_kind(values["logger"], "logger", "logger")
        _check_logger(values["logger"])
    model = values["model"]
    assert isinstance(model, Mapping)
    _check_name(model.get("name"))


WINDOW_CHOICES: Mapping[str, Sequence[str]] = {
    "queries": ("grid", "last", "uniform"),
    "softmax": ("all", "prefix"),
    "group": ("mean", "max"),
}
"""Keys of the group `windows` that have choices; the others are `window` and `kernel`, numbers."""


def check_protected(values: Mapping[str, object]) -> None:
    """Check that the group `protect`, the leading scales and first tokens that methods keep, holds numbers.

    Raises:
        ConfigError: naming the key.
    """
    protected = _read_group(values, "protect", ("sinks", "condensed", "initial", "leading", "first"))
    for name, scales in protected.items():
        is_sinks = show(scales) == show(values.get("sinks"))  # interpolated, and checked as `sinks`
        if not is_sinks and (type(scales) is not int or scales < 0):
            raise ConfigError(f"protect.{name}={show(scales)}: must be a whole number of at least 0")


def check_windows(values: Mapping[str, object]) -> None:
    """Check the group `windows`, the observed windows of methods.

    Raises:
        ConfigError: naming the key.
    """
    windows = _read_group(values, "windows", (*WINDOW_CHOICES, "window", "kernel"))
    for name, choices in WINDOW_CHOICES.items():
        if (value := windows.get(name)) not in choices:
            raise ConfigError(f"windows.{name}={show(value)}: must be one of {', '.join(choices)}")
    rules = {"window": "a whole number of at least 1", "kernel": "odd and positive"}
    for name, rule in rules.items():
        value = windows.get(name)
        if type(value) is not int or value < 1 or (name == "kernel" and value % 2 == 0):
            raise ConfigError(f"windows.{name}={show(value)}: must be {rule}")


def check_preset(values: Mapping[str, object]) -> None:
    """Check that the choice of `sampling`, if any, is for the model; its patterns of names have `*` for any letters.

    Raises:
        ConfigError: it is for other models.
    """
    preset, model = values.get("sampling"), values.get("model")
    if preset is None or not isinstance(model, Mapping):
        return
    if not isinstance(preset, Mapping) or preset.keys() != {"name", "models"}:
        raise ConfigError(f"sampling={show(preset)}: not a choice of conf/sampling")
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
        raise ConfigError(f"{key}._target_={path}: not a class with {', '.join(names)}, which {group}= needs")


def _check_logger(node: object) -> None:
    """Raise ConfigError if a logger's class has a method `check_installed` that misses a package."""
    assert isinstance(node, Mapping)
    target = import_target(str(node["_target_"]), "logger")
    if (check := getattr(target, "check_installed", None)) is not None:
        check()


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not re.fullmatch(r"\w[^/\0\n]{0,99}", name):
        raise ConfigError(
            f"model.name={show(name)}: must be a folder name: up to 100 characters without a slash, a letter or "
            "digit first"
        )


def _read_group(values: Mapping[str, object], name: str, keys: Sequence[str]) -> Mapping[str, object]:
    group = values.get(name)
    if not isinstance(group, Mapping):
        raise ConfigError(f"{name}={show(group)}: must be a group of keys ({', '.join(keys)})")
    return group
