"""Code that a run was made by: of its classes, which have pins in a release, and of the engine."""

import json
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import NamedTuple

from kvbench.core.config import ConfigError, list_nodes
from kvbench.core.extras import list_requirements
from kvbench.core.files import hash_content, hash_values, read_bytes
from kvbench.core.source import (
    ChangedFileError,
    Code,
    find_spec,
    hold_loaded,
    read_code,
    read_source,
    read_tree,
)

PINS_FILE = Path(__file__).parents[1] / "assets" / "pins.json"
CLASS_PACKAGES = ("eval", "forced", "methods", "models", "scenes")
"""Packages of kvbench whose code is part of a run's identity; the other packages' code is not."""
ENGINE_PACKAGES = ("core", "engine", "kernels")
"""Packages of kvbench whose code is recorded beside a run."""
LIBRARY_FOLDERS = frozenset({"site-packages", "dist-packages"})


class Pins(NamedTuple):
    """Code of a release.

    Attributes:
        class_texts: SHA-256 of all files of `CLASS_PACKAGES`: if it matches, every class is as released.
        engine_texts: SHA-256 of all files of `ENGINE_PACKAGES`.
        engine: SHA-256 of the syntax trees of these files.
        modules: digest of the file of each module of `CLASS_PACKAGES`, as in `Code.files`.
        revisions: revision of each class by dotted name.
    """

    class_texts: str
    engine_texts: str
    engine: str
    modules: Mapping[str, str]
    revisions: Mapping[str, int]


@cache
def read_pins() -> Pins:
    """Return the pins of this release."""
    return Pins(**json.loads(PINS_FILE.read_text(encoding="utf-8")))


def identify_code(key: str, classes: Collection[type]) -> str | None:
    """Return a hash of the code of the classes under a config key; None if all are as released.

    A class that is as released counts by its revision, which its user hashes. Any other class counts by its file and
    the files that this one imports, as syntax trees without comments, formatting and docstrings; other packages count
    by version, except what kvbench requires.

    Raises:
        ConfigError: a class has no source, or a file was edited after it was imported.
    """
    try:
        codes = {name_class(one): read_class(one) for one in classes if not is_pinned(one)}
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from None
    values = {name: [code.sha256, find_versions(code.libraries)] for name, code in codes.items()}
    return hash_values(values) if values else None


@cache
def identify_engine() -> str:
    """Return the SHA-256 of the syntax trees of engine, kernels and core, as of the first call.

    Raises:
        ConfigError: a file was edited after it was imported.
    """
    pins = read_pins()
    try:
        texts = read_packages(ENGINE_PACKAGES)
    except ChangedFileError as error:
        raise ConfigError(str(error)) from None
    return pins.engine if hash_texts(texts) == pins.engine_texts else hash_values(digest_trees(texts))


def describe_code(classes: Iterable[type]) -> Code:
    """Return the files of the classes that are not as released, all together."""
    codes = [read_class(one) for one in classes if not is_pinned(one)]
    return Code(
        {name: digits for code in codes for name, digits in code.files.items()},
        frozenset(name for code in codes for name in code.libraries),
        {name: source for code in codes for name, source in code.sources.items()},
    )


def describe_classes(classes: Collection[type]) -> dict[str, object]:
    """Return the revision of each class by dotted name, whether it is as released, and the hash of its code if not."""
    return {
        name_class(one): {
            "revision": find_revision(one),
            "sha256": None if is_pinned(one) else read_class(one).sha256,
            "pinned": is_pinned(one),
        }
        for one in classes
    }


@cache
def is_as_now(name: str, version: int | str) -> bool:
    """Return whether the code of a class, which is not imported, is that of a run.

    Args:
        name: dotted name of the class.
        version: its revision in the run, or its hash if it was not as released.
    """
    module, _, own = name.rpartition(".")
    stand_in = type(own, (), {"__module__": module, "revision": version})
    try:
        return is_pinned(stand_in) if isinstance(version, int) else read_class(stand_in).sha256 == version
    except ValueError:  # the file was deleted
        return False


def is_pinned(cls: type) -> bool:
    """Return whether revision and code of a class are as released, or it is of a package of kvbench without pins."""
    if cls.__module__.startswith("kvbench.") and not _counts(cls.__module__):
        return True
    pins = read_pins()
    if pins.revisions.get(name_class(cls)) != find_revision(cls):
        return False
    return _is_released(hold_loaded(_counts)) or read_class(cls).files.items() <= pins.modules.items()


@cache
def _is_released(_: int) -> bool:
    """Return whether all files of `CLASS_PACKAGES` are as released."""
    try:
        return hash_texts(read_packages(CLASS_PACKAGES)) == read_pins().class_texts
    except ChangedFileError:  # an error for the classes that use the file
        return False


def find_revision(cls: type) -> int:
    """Return the `revision` of a class; 0 for a class without one."""
    revision = getattr(cls, "revision", 0)
    return revision if isinstance(revision, int) else 0


def read_class(cls: type) -> Code:
    """Return the code of a class: its file and the files that it imports, directly or not.

    Only files of its own distribution, of `CLASS_PACKAGES` of kvbench or outside site-packages count.

    Raises:
        ValueError: the class has no source, or a file was edited after it was imported.
    """
    return _read_class(cls, hold_loaded(_counts))


@cache
def _read_class(cls: type, _: int) -> Code:
    own = _list_own(cls.__module__.partition(".")[0])
    return read_code(cls, lambda module: module.partition(".")[0] in own or _counts(module))


def _list_own(package: str) -> frozenset[str]:
    """Return the top-level names of the distribution that installed a package; empty for kvbench and loose packages."""
    if package == "kvbench" or _is_loose(package):
        return frozenset()
    names = _find_distributions()
    own = {*names.get(package, ())}
    return frozenset([package, *(name for name, several in names.items() if own & {*several})])


@cache  # asked of every loaded module for each class
def _counts(module: str) -> bool:
    if (top := module.partition(".")[0]) != "kvbench":
        return _is_loose(top)
    return module.startswith(tuple(f"kvbench.{package}" for package in CLASS_PACKAGES))


@cache
def _is_loose(top: str) -> bool:
    """Return whether a top-level module is of neither kvbench, the standard library, nor a folder of packages."""
    if top == "__main__":
        return True
    spec = None if top == "kvbench" or top in sys.stdlib_module_names else find_spec(top)
    if spec is None:
        return False
    places = (
        [spec.origin] if spec.has_location and spec.origin else [*(spec.submodule_search_locations or ())]
    )
    return any(not LIBRARY_FOLDERS & {*Path(place).parts} for place in places)


def read_packages(packages: Iterable[str]) -> dict[str, bytes]:
    """Return the content of each module in packages of kvbench, as imported or, if it was not imported, as on disk.

    Raises:
        ChangedFileError: a file was edited after it was imported.
    """
    texts: dict[str, bytes] = {}
    for package in packages:
        spec = find_spec(f"kvbench.{package}")
        for place in map(Path, (spec and spec.submodule_search_locations) or ()):
            for path in sorted(place.rglob("*.py")):
                parts = path.relative_to(place).with_suffix("").parts
                name = ".".join(["kvbench", package, *parts]).removesuffix(".__init__")
                loaded = read_source(name) if name in sys.modules else None
                texts[name] = read_bytes(path) if loaded is None else loaded[1]
    return texts


def hash_texts(texts: Mapping[str, bytes]) -> str:
    """Return one SHA-256 of the contents of modules."""
    return hash_values({name: hash_content(text) for name, text in texts.items()})


def digest_trees(texts: Mapping[str, bytes]) -> dict[str, str]:
    """Return a digest of the syntax tree of each file by module, without comments and docstrings."""
    return {name: read_tree(name, None, text)[0] for name, text in texts.items()}


def find_versions(packages: Collection[str]) -> dict[str, str]:
    """Return the versions of installed packages by import name, without kvbench and what it requires."""
    outside = sorted({*packages} - sys.stdlib_module_names - _list_required() - {"kvbench"})
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
    return frozenset(name.lower() for name in list_requirements().get(None, ()))


_find_distributions = cache(packages_distributions)
"""Function that returns the distributions of each top-level package; its first call takes a third of a second."""


def name_class(cls: type) -> str:
    """Return the dotted name of a class, as `_target_` has it."""
    return f"{cls.__module__}.{cls.__qualname__}"


def list_classes(one: object, settings: object) -> tuple[type, ...]:
    """Return the distinct classes of an object, of the objects in it, and of `_target_` keys in its settings."""
    return tuple(dict.fromkeys([*find_inner_classes(one), *_find_targets(settings)]))


def find_inner_classes(one: object) -> Iterator[type]:
    """Yield the class of an object and, if it is a dataclass, the classes of dataclasses in its fields, recursively."""
    yield type(one)
    # Other attributes, such as a method's plan, are there only after it was prepared.
    for part in fields(one) if is_dataclass(one) else ():
        value = getattr(one, part.name)
        if is_dataclass(value) and not isinstance(value, type):
            yield from find_inner_classes(value)


def _find_targets(settings: object) -> Iterator[type]:
    """Yield the imported classes that the `_target_` keys of settings name."""
    for _, node in list_nodes(settings):
        module, _, name = str(node["_target_"]).rpartition(".")
        known = getattr(sys.modules.get(module), name, None)
        if isinstance(known, type):
            yield known
