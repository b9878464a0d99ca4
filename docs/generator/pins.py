"""Pins of kvbench's classes: `make pins` writes their revisions and code hashes."""

import json
import pkgutil
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import kvbench.conf
import kvbench.methods
from kvbench.core.files import write_whole
from kvbench.methods.shared.base import Observer
from kvbench.runs.code import PINS_FILE, Pin, find_revision, name_class, read_pinned

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


def measure_pins() -> dict[str, Pin]:
    """Return the pins that fit the code as it is."""
    return {name_class(one): Pin(find_revision(one), read_pinned(one).sha256) for one in list_classes()}


def format_pins(pins: dict[str, Pin]) -> str:
    """Return pins as JSON, one class a line."""
    lines = [f"{json.dumps(name)}: {json.dumps(pin)}" for name, pin in pins.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    write_whole(PINS_FILE, format_pins(measure_pins()))
