"""Installed packages that add methods, models, prompts or metrics."""

import sys
from functools import lru_cache
from importlib.metadata import entry_points
from typing import NamedTuple

GROUP = "kvbench.plugins"
"""Entry point group in which a package names its configuration folder."""


class Plugin(NamedTuple):
    """One entry point of the group `kvbench.plugins`.

    Attributes:
        package: name of the installed distribution.
        version: its version.
        module: dotted name of the package that holds its configuration files.
    """

    package: str
    version: str
    module: str


def find_plugins() -> list[Plugin]:
    """Return the plugins of this environment, ordered by package, without importing them."""
    return list(_find_plugins(tuple(sys.path)))


@lru_cache(1)
def _find_plugins(_: tuple[str, ...]) -> tuple[Plugin, ...]:
    """Search the folders of `sys.path` once; Hydra calls this for every job of a sweep."""
    return tuple(
        sorted(
            Plugin(entry.dist.name, entry.dist.version, entry.value)
            for entry in entry_points(group=GROUP)
            if entry.dist is not None
        )
    )
