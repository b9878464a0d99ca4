"""Names, classes and settings of the methods in conf/method and in plugins, without an object of any."""

from collections.abc import Iterable
from functools import cache
from typing import Any

import hydra
import pytest
from hydra.core.plugins import Plugins
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf

from benchmarks.support import build
from kvbench.cli.config.search_path import PluginSearchPath, list_choices
from kvbench.core.segments import Family
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.wrapper import Wrapper
from tests.support.places import ROOT


@cache
def list_methods() -> tuple[str, ...]:
    """Names of all methods, plugins' included, without those in subfolders and without guests."""
    return tuple(name for name in _list_names("method") if name not in GUESTS)


@cache
def list_variants() -> tuple[str, ...]:
    """Names of further settings: of classes that another name has, and those in subfolders."""
    others = [name for name in list_methods() if name not in list_representatives()]
    place = ROOT / "conf" / "method"  # Hydra takes 30 ms to see that a folder is not there
    groups = [one for one in list_methods() if (place / one).is_dir() or not (place / f"{one}.yaml").exists()]
    return (*others, *(f"{name}/{own}" for name in groups for own in _list_names(f"method/{name}")))


@cache
def list_representatives() -> tuple[str, ...]:
    """Return one name per class, that of its module or the first; wrappers and variants of a score are left out."""
    first: dict[type, str] = {}
    for name in sorted(list_methods(), key=lambda name: name not in class_of(name).__module__.split(".")):
        kind = class_of(name)
        if not issubclass(kind, Wrapper) and not kind.__module__.startswith("kvbench.methods.contents."):
            first.setdefault(kind, name)
    return tuple(sorted(first.values()))


@cache
def settings_of(name: str) -> DictConfig:
    """Settings of a method's file, with unresolved interpolations; Hydra, ten times slower, reads plugins' files."""
    if (ROOT / "conf" / "method" / f"{name}.yaml").is_file():
        return OmegaConf.create(build.read_choice("method", name))
    return compose(name)


def compose(name: str) -> DictConfig:
    """The same by Hydra."""
    Plugins.instance().register(PluginSearchPath)
    path = f"method/{name}"
    with hydra.initialize_config_module("kvbench.conf", version_base="1.3"):
        found = OmegaConf.select(hydra.compose(path), path.rpartition("/")[0].replace("/", "."))
    assert isinstance(found, DictConfig)
    return found


def class_of(name: str) -> type[Method]:
    """The class that a method's file names."""
    found = get_class(settings_of(name)._target_)
    assert issubclass(found, Method)
    return found


GUESTS = ("kvpress",)
"""Methods of other packages, which have tests of their own."""
KINDS = (
    "full", "heatkv", "headkv", "streaming_llm", "random", "h2o", "snapkv", "adakv", "lookm", "lagkv", "pricekv",
    "quest", "hackpp",
)  # fmt: skip
"""One method for each way of keeping: whole, by schedule, by calibrated heads, a window, at random, by sums, by a
window's queries, heads of unequal length, merged, in parts, by prices, and with sparse reads."""


def mark_by_kind(names: Iterable[str], quick: str = "") -> list[Any]:
    """Mark methods: `make test` runs the quick one, `make check` one of each kind, `make nightly` all."""
    slow, nightly = pytest.mark.slow, pytest.mark.nightly
    marks = {name: slow if name in KINDS else nightly for name in names}
    return [name if name == quick else pytest.param(name, marks=mark) for name, mark in marks.items()]


@cache
def methods_for(family: Family) -> tuple[str, ...]:
    """Names of the methods of conf/method that fit a family, in alphabetical order."""
    names = sorted(path.stem for path in (ROOT / "conf" / "method").glob("*.yaml"))
    return tuple(name for name in names if name not in GUESTS and family in class_of(name).families)


def _list_names(group: str) -> tuple[str, ...]:
    Plugins.instance().register(PluginSearchPath)
    with hydra.initialize_config_module("kvbench.conf", version_base="1.3"):
        return tuple(list_choices(group))
