"""Code of the classes that decide a run's samples and scores, and the pins of this repository's own classes."""

import json
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import is_dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from kvbench.core.config import ConfigError
from kvbench.core.files import hash_values
from kvbench.core.source import Code, read_code, read_loaded

PINS_FILE = Path(__file__).parents[1] / "assets" / "pins.json"
READ_PACKAGES = frozenset({"eval", "methods", "models", "scenes"})
"""Packages of kvbench whose code counts; engine, kernels, core and the conduct of runs do not."""
LIBRARY_FOLDERS = frozenset({"site-packages", "dist-packages"})


class Pin(NamedTuple):
    """Revision of a class and the SHA-256 of its code at that revision."""

    revision: int
    sha256: str


def identify_code(key: str, classes: Collection[type]) -> str | None:
    """Return a hash of the code of the classes under a config key; None if all match their pins.

    A class that matches its pin counts by its revision, which its user hashes. The code of any other class counts as
    syntax trees, without comments, formatting and docstrings, and the packages that it imports count by version, except
    kvbench and what kvbench requires.

    Raises:
        ConfigError: a class has no Python source and is of no installed package.
    """
    changed = [one for one in classes if not is_pinned(one)]
    try:
        codes = {name_class(one): _read_changed(one) for one in changed}
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from None
    values = {name: [code.sha256, find_versions(code.libraries)] for name, code in codes.items()}
    return hash_values(values) if values else None


def describe_code(classes: Collection[type]) -> Code:
    """Return all definitions of classes and what they use, and the sources of classes that match no pin."""
    codes = {one: _read_own(one, read_loaded(_counts), with_pins=False) for one in classes}
    changed = [code for one, code in codes.items() if not is_pinned(one)]
    return Code(
        {name: text for code in codes.values() for name, text in code.definitions.items()},
        frozenset(name for code in changed for name in code.libraries),
        {name: source for code in changed for name, source in code.sources.items()},
    )


def describe_classes(classes: Collection[type]) -> dict[str, object]:
    """Return revision, code hash and whether both match a pin, for each class by its dotted name."""
    return {
        name_class(one): {
            "revision": find_revision(one),
            "sha256": describe_code([one]).sha256,
            "pinned": is_pinned(one),
        }
        for one in classes
    }


def is_pinned(cls: type) -> bool:
    """Return whether a class matches its pin in revision and code, or belongs to a package of kvbench without pins."""
    if cls.__module__.startswith("kvbench.") and not _counts_in_kvbench(cls.__module__):
        return True
    pin = read_pins().get(name_class(cls))
    return pin is not None and pin == (find_revision(cls), read_pinned(cls).sha256)


def find_revision(cls: type) -> int:
    """Return the `revision` of a class; 0 for a class without one."""
    revision = getattr(cls, "revision", 0)
    return revision if isinstance(revision, int) else 0


def read_pinned(cls: type) -> Code:
    """Return the code of a class of kvbench, whose pin holds its SHA-256."""
    return _read_pinned(cls, read_loaded(_counts))


@cache
def _read_pinned(cls: type, _: int) -> Code:
    return read_code([cls], _counts_in_kvbench)


def _read_changed(cls: type) -> Code:
    """Return the code of a class without a matching pin; classes with one, which it uses, count by their revision."""
    return _read_own(cls, read_loaded(_counts), with_pins=True)


@cache
def _read_own(cls: type, _: int, *, with_pins: bool) -> Code:
    """Return the code of a class in its package, in kvbench and in modules of no installed package.

    Without Python source the class counts by the version of its package.
    """
    top = cls.__module__.partition(".")[0]

    def is_read(module: str) -> bool:
        return _counts(module) or module.partition(".")[0] == top != "kvbench"

    def replace(module: str, name: str) -> str | None:
        if not with_pins or f"{module}.{name}" not in read_pins():
            return None
        known = getattr(sys.modules.get(module), name, None)
        if isinstance(known, type) and known is not cls and is_pinned(known):
            return f"revision {find_revision(known)}"
        return None

    try:
        return read_code([cls], is_read, replace)
    except ValueError:
        if not find_versions([top]):
            raise
        return Code(libraries=frozenset([top]))


@cache
def _counts(module: str) -> bool:
    return _counts_in_kvbench(module) or _is_loose(module.partition(".")[0])


def _counts_in_kvbench(module: str) -> bool:
    top, _, rest = module.partition(".")
    return top == "kvbench" and rest.partition(".")[0] in READ_PACKAGES


@cache
def _is_loose(top: str) -> bool:
    """Return whether a top-level module belongs neither to kvbench, the standard library, nor an installed package."""
    if top == "kvbench" or top in sys.stdlib_module_names:
        return False
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):  # `__main__` has no specification
        return False
    origin = None if spec is None else spec.origin
    return origin is not None and origin.endswith(".py") and not LIBRARY_FOLDERS & {*Path(origin).parts}


def find_versions(packages: Collection[str]) -> dict[str, str]:
    """Return the versions of installed packages by import name, without kvbench and what it requires."""
    outside = sorted(set(packages) - sys.stdlib_module_names - _list_required() - {"kvbench"})
    if not outside:
        return {}
    names = _find_distributions()
    return {
        package: version(distribution)
        for package in outside
        for distribution in names.get(package, ())
        if distribution.lower() not in _list_required()
    }


@cache
def _list_required() -> frozenset[str]:
    """Return the names of the distributions that kvbench requires without extras, in lower case."""
    try:
        lines = requires("kvbench") or []
    except PackageNotFoundError:
        return frozenset()
    names = (re.match(r"[\w.-]+", line) for line in lines if "extra ==" not in line)
    return frozenset(name[0].lower() for name in names if name is not None)


_find_distributions = cache(packages_distributions)
"""The distributions of each top-level package, read once, which takes a third of a second."""


@cache
def read_pins() -> Mapping[str, Pin]:
    """Return the pins of kvbench's classes by dotted name."""
    return {name: Pin(*pin) for name, pin in json.loads(PINS_FILE.read_text(encoding="utf-8")).items()}


def name_class(cls: type) -> str:
    """Return the dotted name of a class, as `_target_` has it."""
    return f"{cls.__module__}.{cls.__qualname__}"


def list_classes(one: object, settings: object) -> tuple[type, ...]:
    """Return the classes of an object and of the objects in it, and those that its settings name, each once."""
    return tuple(dict.fromkeys([*find_inner_classes(one), *_find_targets(settings)]))


def find_inner_classes(one: object) -> Iterator[type]:
    """Yield the class of an object and, if it is a dataclass, of the dataclasses among its fields."""
    yield type(one)
    for value in vars(one).values() if is_dataclass(one) else ():
        if is_dataclass(value) and not isinstance(value, type):
            yield from find_inner_classes(value)


def _find_targets(settings: object) -> Iterator[type]:
    """Yield the classes that the `_target_` keys of settings name; these are imported."""
    if isinstance(settings, Mapping):
        module, _, name = str(settings.get("_target_", "")).rpartition(".")
        known = getattr(sys.modules.get(module), name, None)
        if isinstance(known, type):
            yield known
        settings = list(settings.values())
    if isinstance(settings, list | tuple):
        for value in settings:
            yield from _find_targets(value)
