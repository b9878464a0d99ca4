"""Extras of kvbench, versions of packages, and the command that installs an optional package."""

import importlib.metadata
import re
from functools import cache

DISTRIBUTIONS = {
    "cleanfid": "clean-fid",
    "open_clip": "open_clip_torch",
    "torch_fidelity": "torch-fidelity",
    "math_verify": "math-verify",
}
"""Distribution names of packages that have another import name."""
COLLECTIONS = ("all", "dev")
"""Extras that only collect other extras or add tools for development."""
NAME = re.compile(r"[\w.-]+")
"""Name of a distribution at the beginning of a requirement."""
EXTRA = re.compile(r"extra == ['\"](\w+)['\"]")


def list_requirements() -> dict[str | None, tuple[str, ...]]:
    """Return the distributions that kvbench requires, by extra, None without one; empty if it is not installed."""
    found: dict[str | None, list[str]] = {}
    try:
        lines = importlib.metadata.requires("kvbench") or ()
    except importlib.metadata.PackageNotFoundError:
        return {}
    for line in lines:
        if name := NAME.match(line):
            extra = EXTRA.search(line)
            found.setdefault(extra and extra[1], []).append(name[0])
    return {extra: tuple(names) for extra, names in found.items()}


def list_extras() -> dict[str, tuple[str, ...]]:
    """Return the distributions of each extra, without `all` and `dev`; empty if kvbench is not installed."""
    known = list_requirements().items()
    return {extra: names for extra, names in known if extra is not None and extra not in COLLECTIONS}


@cache  # each call reads and parses a file
def find_version(package: str) -> str | None:
    """Return the version of an installed distribution, or imported package; None if it is not installed."""
    try:
        return importlib.metadata.version(DISTRIBUTIONS.get(package, package))
    except importlib.metadata.PackageNotFoundError:
        return None


def install_command(package: str) -> str:
    """Return the command that installs an imported package: its extra, or its distribution if none has it.

    >>> install_command("a_package_of_a_plugin")
    'pip install a_package_of_a_plugin'
    """
    distribution = DISTRIBUTIONS.get(package, package)
    for extra, names in list_extras().items():
        if distribution in names:
            return f'pip install "kvbench[{extra}]"'
    return f"pip install {distribution}"
