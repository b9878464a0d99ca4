"""Command that repeats a run: the differences of its configuration from the files of conf/."""

import re
import shlex
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from kvbench.core.gpus import resolve_noise
from kvbench.runs.record.results import Results

TOP_LEVEL_KEYS = (
    "budget", "budget_unit", "sinks", "seed", "shuffle", "batch_size", "device", "cache_dtype", "cuda_graph",
    "batch_invariant",
)  # fmt: skip
"""Top-level keys that may change samples or their costs."""
OTHER_VALUES = ("null", "true", "false", "nan", "inf")
"""Words that Hydra's command line does not parse as strings."""
DEFAULTS = {"protect": "equal", "windows": "image", "storage": "channel", "prompts": "scenes"}
"""Default choice of each group in conf/config.yaml."""


def write_command(run: Results) -> str:
    """Return the command that repeats a run in the default runs_dir.

    Models, methods and prompts of plugins are named without their settings; evaluators of plugins are left out.
    """
    bound = run.method.startswith("full, ")
    # The model's file in conf/model may have a different name.
    model = run.model if _load(f"model/{run.model}") else _find_choice(run, "model") or run.model
    overrides = ["task=bounds"] if bound else []
    overrides += [f"model={model}", f"method={'full' if bound else run.method}"]
    overrides += _compare_plain(run)
    for group, usual in DEFAULTS.items():
        if group == "storage" and not run.storage:
            continue  # a command without low-bit storage rejects this group
        usual = _load(f"model/{model}").get(f"default_{group}", usual)
        if (choice := _find_choice(run, group)) and choice != usual:
            overrides.append(f"{group}={choice}")
        overrides += _compare(run, group, choice or "")
    overrides += _compare(run, "model", model) + _compare(run, "method", run.method)
    overrides += _list_differences(run, "calibrate", _load("config")["calibrate"], _section(run, "calibrate"))
    overrides += _compare_evaluators(run)
    return " ".join(map(shlex.quote, ("python", "run.py", *overrides)))


@lru_cache
def _load(path: str) -> Mapping[str, Any]:
    """Return a file of conf/ merged with the files of its defaults; empty if there is no such file."""
    file = files("kvbench.conf").joinpath(*f"{path}.yaml".split("/"))
    if not file.is_file():
        return {}
    values = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    folder = path.rpartition("/")[0]
    merged: dict[str, Any] = {}
    for base in values.pop("defaults", []):
        if isinstance(base, Mapping):  # the method inside another
            [(group, choice)] = base.items()
            outer, _, key = group.removeprefix("override ").lstrip("/").partition("@")
            merged |= {key: _load(f"{outer}/{choice}")} if key else {}
        elif base != "_self_":
            name = base.removesuffix("@_here_")
            merged = _merge(merged, _load(name[1:] if name.startswith("/") else f"{folder}/{name}"))
    return _merge(merged, values)


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    both = {
        key: _merge(base[key], value)
        for key, value in over.items()
        if isinstance(value, Mapping) and isinstance(base.get(key), Mapping)
    }
    return {**base, **over, **both}


def _section(run: Results, group: str) -> Mapping[str, Any]:
    section = run.setting(group)
    return section if isinstance(section, Mapping) else {}


def _compare_plain(run: Results) -> list[str]:
    usual = resolve_noise("auto", str(run.setting("device")))
    return [
        *([] if run.noise == usual else [f"noise={run.noise}"]),
        *(
            f"{key}={write_value(run.setting(key))}"
            for key in TOP_LEVEL_KEYS
            if key in run.config and run.setting(key) != _resolve(_load("config").get(key), run)
        ),
    ]


def _compare_evaluators(run: Results) -> list[str]:
    names = [name for name in _section(run, "eval") if _load(f"eval/{name}")]
    defaults: Mapping[str, Any] = {}
    for name in names:
        defaults = _merge(defaults, _load(f"eval/{name}"))
    actual = {name: _section(run, f"eval.{name}") for name in names}
    return [
        f"eval=[{','.join(names)}]" if names else "eval=none",
        *_list_differences(run, "eval", defaults, actual),
    ]


def _find_choice(run: Results, group: str, path: str | None = None) -> str | None:
    """Return the choice of a group that differs least from a run's section; None if none has its class.

    `path` is the key of the section; None for the name of the group.
    """
    section = _section(run, path or group)
    alike = [
        name
        for name in _list_choices(group)
        if _load(f"{group}/{name}").get("_target_") == section.get("_target_")
    ]
    if len(alike) == 1:
        return alike[0]
    return min(alike, key=lambda name: len(_compare(run, group, name, path)), default=None)


@lru_cache
def _list_choices(group: str) -> list[str]:
    """Return the sorted names of the files of a group."""
    names = (path.name for path in (files("kvbench.conf") / group).iterdir())
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def _compare(run: Results, group: str, choice: str, path: str | None = None) -> list[str]:
    """Return the overrides that turn a choice of a group into a run's section; `path` as of `_find_choice`."""
    defaults, key = _load(f"{group}/{choice}"), path or group
    if key == "prompts" and choice == "own":  # its prompts are a choice of the same group
        inner = _find_choice(run, group, "prompts.of")
        return [f"prompts.of={inner}", *_compare(run, group, inner, "prompts.of")] if inner else []
    return list(_list_differences(run, key, defaults, _section(run, key))) if defaults else []


def _list_differences(
    run: Results, key: str, defaults: Mapping[str, Any], actual: Mapping[str, Any]
) -> Iterator[str]:
    for name, value in actual.items():
        path, default = f"{key}.{name}", defaults.get(name)
        if name.startswith("_"):
            continue
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            if value.get("_target_") != default.get("_target_") and (
                choice := _find_choice(run, "method", path)
            ):
                yield f"{path}={choice}"
                default = _load(f"method/{choice}")
            yield from _list_differences(run, path, default, value)
        elif name not in defaults:
            yield f"++{path}={write_value(value)}"
        elif value != _resolve(default, run):
            yield f"{path}={write_value(value)}"


def _resolve(value: object, run: Results) -> object:
    """Return a setting of conf/ with `${key}` or `${oc.select:key,value}` replaced by the run's value of that key."""
    pattern = r"\$\{(?:oc\.select:)?([\w.]+)(?:,(.*))?\}"
    reference = re.fullmatch(pattern, value) if isinstance(value, str) else None
    if reference is None:
        return value
    key, otherwise = reference.groups()
    if (known := run.setting(f"method{key}" if key.startswith(".") else key)) is not None:
        return known
    return None if otherwise is None else yaml.safe_load(otherwise)


def write_value(value: object) -> str:
    """Return a setting in the syntax of Hydra's command line.

    Raises:
        TypeError: the setting is neither a JSON value nor a path; the message is its type.
    """
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{write_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(write_value, value)) + "]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return repr(value)
    if not isinstance(value, str | Path):
        raise TypeError(type(value).__name__)
    text = str(value)
    if re.fullmatch(r"[A-Za-z_/][\w./:-]*", text) and text.lower() not in OTHER_VALUES:
        return text
    return "'" + re.sub(r"(\\+)(?='|\Z)", r"\1\1", text).replace("'", r"\'") + "'"
