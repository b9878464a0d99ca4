"""Objects from conf/*.yaml without Hydra, so that benchmarks need only torch and PyYAML.

This module supports what conf/ uses of Hydra: groups, `defaults` within a group, `_target_`, `${key}`,
`${oc.select:key,value}` and overrides `key=value`.
"""

import importlib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from kvbench.core.budget import Budget
from kvbench.core.gpus import resolve_device, resolve_noise
from kvbench.core.segments import ModelSpec
from kvbench.core.storage import CODE_DTYPES, StorageConfig
from kvbench.engine.cache import KVCache
from kvbench.engine.coding.codebooks import Codebooks
from kvbench.engine.coding.formats import Packing, wants_codebooks
from kvbench.engine.recording.graphs import GraphRecorder
from kvbench.methods.full import Full
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.calibration import Observer

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"
GROUPS = ("model", "method", "protect", "windows", "storage", "prompts")
"""Groups of `conf/` that benchmarks compose; others are left out."""


def choices(overrides: Sequence[str] = ()) -> dict[str, str]:
    """Return the choice in each of `GROUPS`: from an override, the model's file or conf/config.yaml."""
    defaults = _read(CONF / "config.yaml")["defaults"]
    usual = {group: name for entry in defaults if isinstance(entry, dict) for group, name in entry.items()}
    given = dict(override.split("=", 1) for override in overrides)
    model = read_choice("model", given.get("model", usual["model"]))
    return {
        group: given[group] if group in given else model.get(f"default_{group}") or usual[group]
        for group in GROUPS
    }


def list_choices(group: str) -> list[str]:
    """Return the names of all choices of a group of `conf/`."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def composed(overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the resolved configuration of `python run.py <overrides>`, without Hydra's own keys.

    Raises:
        ValueError: an override matches no key, or a choice has no file.
    """
    values = _read(CONF / "config.yaml")
    for name in ("defaults", "hydra"):
        del values[name]
    values |= {group: read_choice(group, name) for group, name in choices(overrides).items()}
    base = values["model"].get("default_base")
    if base and values["method"].get("base") == read_choice("method", "forecast"):
        values["method"]["base"] = read_choice("method", base)
    for override in overrides:
        key, _, text = override.partition("=")
        if key not in GROUPS:
            is_choice = key == "method.base" and not text.startswith("{")
            _put(values, key, read_choice("method", text) if is_choice else yaml.safe_load(text))
    values["device"] = resolve_device(values["device"])
    values["noise"] = resolve_noise(values["noise"], values["device"])
    resolved: dict[str, Any] = _resolved(values, values, values)
    return resolved


def read_choice(group: str, name: str) -> dict[str, Any]:
    """Return the values of a file of `conf/` and of its `defaults`; interpolations are not resolved.

    Raises:
        ValueError: there is no such file.
    """
    path = CONF / group / f"{name}.yaml"
    if not path.is_file():
        names = ", ".join(sorted(other.stem for other in path.parent.glob("*.yaml")))
        raise ValueError(f"{group}={name}: no such choice; choose from {names}")
    content, values = _read(path), dict[str, Any]()
    for base in content.pop("defaults", ()):
        if base == "_self_":
            continue
        if isinstance(base, str):
            folder, _, file = base.removesuffix("@_here_").rpartition("/")
            values = _merged(
                values, read_choice(folder.strip("/") if folder or base[0] == "/" else group, file)
            )
            continue
        [(key, choice)] = base.items()  # a choice of a different group
        other, _, target = key.removeprefix("override ").removeprefix("/").partition("@")
        values |= {target: read_choice(other, choice)}
    return _merged(values, content)


def built(node: Any) -> Any:
    """Build the object of a node's `_target_`, inner nodes first; return plain values unchanged."""
    if isinstance(node, list):
        return [built(item) for item in node]
    if not isinstance(node, Mapping):
        return node
    values = {key: built(value) for key, value in node.items() if key not in ("_target_", "_convert_")}
    if "_target_" not in node:
        return values
    module, _, name = node["_target_"].rpartition(".")
    return getattr(importlib.import_module(module), name)(**values)


def build_model(name: str, *overrides: str) -> Any:
    """Build a model of `conf/model`; overrides as in `composed`."""
    return built(composed([f"model={name}", *overrides])["model"])


def prepare_method(spec: ModelSpec, budget: str | float, overrides: Sequence[str]) -> Method:
    """Prepare a method for a model, with a random calibration; the full cache ignores the budget.

    Raises:
        ValueError: the method does not fit the model, or the budget is too small for it.
    """
    method: Method = built(composed(overrides)["method"])
    needs = method.needs()
    artifact = needs.make_random_artifact(spec) if isinstance(needs, Observer) else None
    method.prepare(spec, Budget.parse(1 if isinstance(method, Full) else budget, spec), artifact)
    return method


def open_cache(
    model: Any, method: Method, device: Any, stored: str | None = None, record: GraphRecorder | None = None
) -> KVCache:
    """Open a cache of a model with a prepared method.

    Args:
        model: a model whose `compute_dtype` is the dtype of its blocks.
        method: a method prepared for the model.
        device: device of the cache.
        stored: dtype of a low-bit cache and a file of `conf/storage`, such as `int4:codebooks`; `channel` by default.
        record: recorder of the cache's steps; None records nothing.
    """
    how: dict[str, Any] = {"dtype": model.compute_dtype(device), "device": device, "record": record}
    if stored is not None:
        name, _, choice = stored.partition(":")
        config = StorageConfig(**composed([f"storage={choice or 'channel'}"])["storage"])
        how["packing"] = Packing(CODE_DTYPES[name], config, fp8=name == "fp8")
        how["rotation"] = model.key_rotation()
        wants = wants_codebooks(how["packing"], method)
        how["codebooks"] = Codebooks().make_random_artifact(model.spec).tensors if wants else None
    return KVCache(model.spec, method, **how)


def _read(path: Path) -> dict[str, Any]:
    return deepcopy(_parse(path))


@cache
def _parse(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(path.read_text())
    return values


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    updates = {
        key: _merged(below[key], value)
        if isinstance(value, dict) and isinstance(below.get(key), dict)
        else value
        for key, value in above.items()
    }
    return {**below, **updates}


def _put(values: dict[str, Any], key: str, value: object) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        values = values.get(parent) or {}
    if last not in values:
        raise ValueError(f"{key}: no such key")
    values[last] = value


def _resolved(node: Any, values: Mapping[str, Any], around: Mapping[str, Any]) -> Any:
    if isinstance(node, dict):
        return {key: _resolved(value, values, node) for key, value in node.items()}
    if isinstance(node, list):
        return [_resolved(item, values, around) for item in node]
    if isinstance(node, str) and node.startswith("${name_model:"):
        return node.removesuffix("}").rpartition(",")[2]  # the name of a model without files
    if isinstance(node, str) and node.startswith("${") and node.endswith("}"):
        name, _, default = node[2:-1].removeprefix("oc.select:").partition(",")
        value: Any = around if name.startswith(".") else values
        for key in name.removeprefix(".").split("."):
            if default and key not in value:
                return yaml.safe_load(default)
            around, value = value, value[key]
        return _resolved(value, values, around)
    return node
