"""Registry of metrics: the files of conf/eval and of plugins, read without Hydra."""

from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import yaml

from kvbench.core.config import import_target
from kvbench.core.files import resolve_path

FOLDER = Path(__file__).resolve().parents[1] / "conf" / "eval"
PLUGINS = "kvbench.plugins"
"""Entry point group in which a package names its folder of configuration files."""
LOOKUPS = ("hydra.utils.get_class", "hydra.utils.get_method", "hydra.utils.get_object")
"""Targets that import the object that `path` names and do not call it."""

Settings = dict[str, Any]


def describe_metrics() -> dict[str, str]:
    """Return the comment that opens a file, by the name of its metric or group of metrics."""
    texts = {path.stem: path.read_text(encoding="utf-8") for path in _list_files()}
    opening = {name: text.partition("\n")[0] for name, text in sorted(texts.items()) if yaml.safe_load(text)}
    return {name: line.removeprefix("# ") if line.startswith("# ") else "" for name, line in opening.items()}


def read_metrics(name: str) -> dict[str, Settings]:
    """Return the settings of a metric, or of every metric of a group, by name of the metric.

    Args:
        name: of a file in conf/eval or in a plugin's `eval`, or the path of any other .yaml file of that form.

    Raises:
        ValueError: there is no such file, or it does not hold metrics.
    """
    known = {path.stem: path for path in _list_files()}
    path = known.get(name, Path(name))
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        members, own = content.pop("defaults", []), content
        wrong = [key for key, settings in own.items() if "_target_" not in settings]
    except OSError:
        raise ValueError(f"{name}: no such metric; choose from {', '.join(sorted(known))}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not YAML ({' '.join(str(error).split())})") from None
    except (AttributeError, TypeError):
        raise ValueError(f"{path}: holds no metrics by name") from None
    if wrong:
        raise ValueError(f"{path}: {wrong[0]} names no class in _target_")
    found: dict[str, Settings] = {}
    for member in members:
        beside = path.with_name(f"{member}.yaml")
        found |= read_metrics(str(beside) if beside.is_file() else str(member))
    return found | own


def change_settings(metrics: dict[str, Settings], change: str) -> None:
    """Apply a change such as `batch=4` to every metric with that setting, or `kid.batch=4` to `kid` alone.

    Args:
        metrics: settings by name of the metric, changed in place.
        change: setting and new value; `space.batch=4` reaches into the setting `space`.

    Raises:
        ValueError: it has no value, no metric has the setting, or the value is of another kind.
    """
    wanted, equals, text = change.partition("=")
    if not equals:
        raise ValueError(f"--set {change}: NAME=VALUE is needed, such as batch=4")
    leaves = list(_leaves(metrics))
    places = [(owner, key) for name, owner, key in leaves if wanted in (name, name.partition(".")[2])]
    if not places:
        known = ", ".join(name for name, _, _ in leaves) or "none"
        raise ValueError(f"--set {change}: no such setting; there are {known}")
    for owner, key in places:
        try:
            owner[key] = _read(text, owner[key])
        except (KeyError, ValueError):
            kind = type(owner[key]).__name__
            raise ValueError(f"--set {change}: {kind} is needed, such as {owner[key]}") from None


def build_metrics(metrics: dict[str, Settings]) -> list[Any]:
    """Return the evaluators that settings describe.

    Raises:
        ValueError: a setting is left to run.py, or a class cannot be imported or refuses its settings.
    """
    for name, owner, key in _leaves(metrics):
        if "${" in str(owner[key]):
            raise ValueError(f"{name}: {owner[key]} is known to run.py alone; give it with --set {name}=...")
    return [_build(settings, name) for name, settings in metrics.items()]


def _list_files() -> list[Path]:
    """Return the files of metrics and groups, kvbench's own last, so that they win over others of their name."""
    folders = [resolve_path(f"pkg://{entry.value}/eval") for entry in entry_points(group=PLUGINS)]
    return [path for folder in (*folders, FOLDER) for path in folder.glob("*.yaml")]


def _leaves(settings: Settings, prefix: str = "") -> Iterator[tuple[str, Settings, str]]:
    """Give every setting by its full name, with the mapping it stands in and its key there."""
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        elif key != "_target_":
            yield prefix + key, settings, key


def _read(text: str, before: object) -> object:
    """Return the value that a text stands for where `before` stood."""
    if isinstance(before, bool):
        return {"true": True, "false": False}[text.lower()]
    if isinstance(before, int | float):
        return type(before)(text)
    return None if text == "null" else text


def _build(settings: Any, key: str) -> Any:
    """Return a metric's settings with an object in place of every mapping that has a `_target_`; `key` names it."""
    if isinstance(settings, list):
        return [_build(item, key) for item in settings]
    if not isinstance(settings, dict):
        return settings
    own = {name: _build(value, key) for name, value in settings.items() if name != "_target_"}
    if "_target_" not in settings:
        return own
    if settings["_target_"] in LOOKUPS:
        return import_target(own["path"], key)
    target: Any = import_target(settings["_target_"], key)
    try:
        return target(**own)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{key}: {error}") from None
