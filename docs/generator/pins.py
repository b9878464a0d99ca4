"""Pins of kvbench's code: `make pins` writes the revisions of classes and what stands for each file."""

import json
import pkgutil
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import kvbench.conf
import kvbench.methods
from kvbench.core.files import hash_values, write_whole
from kvbench.methods.shared.calibration import Observer
from kvbench.runs.code import (
    CLASS_PACKAGES,
    ENGINE_PACKAGES,
    PINS_FILE,
    Pins,
    digest_trees,
    find_revision,
    hash_texts,
    name_class,
    read_packages,
)

GROUPS = ("method", "model", "eval")
"""Groups of the configuration whose classes decide samples and scores."""


def list_classes() -> list[type]:
    """Return the classes that the configuration of methods, models and metrics names, and all calibrations, by name."""
    found = {name_class(one): one for one in (*_find_configured(), *_find_observers())}
    return [found[name] for name in sorted(found)]


def _find_configured() -> Iterator[type]:
    for folder in map(Path, kvbench.conf.__path__):
        for path in sorted(path for group in GROUPS for path in (folder / group).rglob("*.yaml")):
            for target in re.findall(r"_target_: *(kvbench\.[\w.]+)", path.read_text(encoding="utf-8")):
                module, _, name = target.rpartition(".")
                yield getattr(import_module(module), name)


def _find_observers() -> Iterator[type]:
    for one in pkgutil.walk_packages(kvbench.methods.__path__, "kvbench.methods."):
        for value in vars(import_module(one.name)).values():
            if isinstance(value, type) and issubclass(value, Observer) and value.__module__ == one.name:
                yield value


def measure_pins() -> Pins:
    """Return the pins that fit the code as it is."""
    classes, engine = read_packages(CLASS_PACKAGES), read_packages(ENGINE_PACKAGES)
    revisions = {name_class(one): find_revision(one) for one in list_classes()}
    trees = digest_trees(classes), hash_values(digest_trees(engine))
    return Pins(hash_texts(classes), hash_texts(engine), trees[1], trees[0], revisions)


def format_pins(pins: Pins) -> str:
    """Return pins as JSON, one module or class a line."""
    return json.dumps(pins._asdict(), indent=0) + "\n"


if __name__ == "__main__":
    write_whole(PINS_FILE, format_pins(measure_pins()))
