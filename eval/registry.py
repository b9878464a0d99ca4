"""Registry of metrics: files of conf/eval and of plugins, read without Hydra."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from kvbench.core.config import import_target
from kvbench.core.files import resolve_path
from kvbench.core.plugins import find_plugins
from kvbench.core.suggestions import suggest

FOLDER = Path(__file__).resolve().parents[1] / "conf" / "eval"
LOOKUP_TARGETS = ("hydra.utils.get_class", "hydra.utils.get_method", "hydra.utils.get_object")
"""Targets that import the object named by `path` without calling it."""
KEY = re.compile(r"^[^#\s]", re.MULTILINE)
"""Beginning of a line that is neither a comment nor part of a group."""

Settings = dict[str, Any]


def describe_metrics() -> dict[str, str]:
    """Return the first comment of each file, by name of the metric or group."""
    texts = {path.stem: path.read_text(encoding="utf-8") for path in _list_files()}
    opening = {name: text.partition("\n")[0] for name, text in sorted(texts.items()) if KEY.search(text)}
    return {name: line.removeprefix("# ") if line.startswith("# ") else "" for name, line in opening.items()}


def read_metrics(name: str) -> dict[str, Settings]:
    """Return the settings of a metric, or of all metrics of a group, by name of the metric.

    Args:
        name: file name in conf/eval or a plugin's `eval`, or path of another .yaml file.

    Raises:
        ValueError: the file is missing, or does not hold metrics.
    """
    known = {path.stem: path for path in _list_files()}
    path = known.get(name, Path(name))
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        members = content.pop("defaults", [])
        wrong = [key for key, settings in content.items() if "_target_" not in settings]
    except OSError:
        choices = suggest(name, sorted(known), "eval")
        raise ValueError(f"{name or 'empty name'}: no such metric or group{choices}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not YAML ({' '.join(str(error).split())})") from None
    except (AttributeError, TypeError):
        raise ValueError(f"{path}: must map each metric's name to settings with _target_") from None
    if wrong:
        raise ValueError(f"{path}: {wrong[0]} has no _target_; name its class there")
    metrics: dict[str, Settings] = {}
    for member in members:
        sibling = path.with_name(f"{member}.yaml")
        metrics |= read_metrics(str(sibling) if sibling.is_file() else str(member))
    return metrics | content


def change_settings(metrics: dict[str, Settings], change: str) -> None:
    """Change a setting in place: `batch=4` in all metrics with that setting, `kid.batch=4` only in `kid`.

    Args:
        metrics: settings by name of the metric.
        change: setting and new value; `space.batch=4` changes `batch` of the setting `space`.

    Raises:
        ValueError: the value is missing or of another type, or no metric has the setting.
    """
    setting, equals, text = change.partition("=")
    if not equals:
        raise ValueError(f"--set {change}: NAME=VALUE is needed, such as batch=4")
    leaves = list(_leaves(metrics))
    matches = [(owner, key) for name, owner, key in leaves if setting in (name, name.partition(".")[2])]
    if not matches:
        known = ", ".join(name for name, _, _ in leaves) or "none"
        raise ValueError(f"--set {change}: no such setting; there are {known}")
    for owner, key in matches:
        try:
            owner[key] = _read(text, owner[key])
        except (KeyError, ValueError):
            kind = type(owner[key]).__name__
            raise ValueError(f"--set {change}: {kind} is needed, such as {owner[key]}") from None


def build_metrics(metrics: dict[str, Settings]) -> list[Any]:
    """Return the evaluators for settings.

    Raises:
        ValueError: a setting is an interpolation, which only run.py resolves, or a class cannot be imported or rejects
            its settings.
    """
    for name, owner, key in _leaves(metrics):
        if "${" in str(owner[key]):
            raise ValueError(f"{name}: {owner[key]} is set by run.py; set it with --set {name}=...")
    return [_build(settings, name) for name, settings in metrics.items()]


def _list_files() -> list[Path]:
    """Return the files of metrics and groups; kvbench's files are last and override plugins' files of the same name."""
    folders = [resolve_path(f"pkg://{plugin.module}/eval") for plugin in find_plugins()]
    return [path for folder in (*folders, FOLDER) for path in folder.glob("*.yaml")]


def _leaves(settings: Settings, prefix: str = "") -> Iterator[tuple[str, Settings, str]]:
    """Yield each setting's full name, the mapping that contains it, and its key in the mapping."""
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        elif key != "_target_":
            yield prefix + key, settings, key


def _read(text: str, before: object) -> object:
    """Convert a string to the type of the previous value; raise KeyError or ValueError if it does not fit."""
    if isinstance(before, bool):
        return {"true": True, "false": False}[text.lower()]
    if isinstance(before, int | float):
        return type(before)(text)
    return None if text == "null" else text


def _build(settings: Any, key: str) -> Any:
    """Replace each mapping with a `_target_` by its object; a ValueError names the metric `key` of a wrong setting."""
    if isinstance(settings, list):
        return [_build(item, key) for item in settings]
    if not isinstance(settings, dict):
        return settings
    built = {name: _build(value, key) for name, value in settings.items() if name != "_target_"}
    if "_target_" not in settings:
        return built
    if settings["_target_"] in LOOKUP_TARGETS:
        return import_target(built["path"], key)
    target: Any = import_target(settings["_target_"], key)
    try:
        return target(**built)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{key}: {error}") from None
