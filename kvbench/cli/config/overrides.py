"""Checks of overrides before a configuration is composed."""

import math
import posixpath
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override

from kvbench.cli.config.loader import is_about_group
from kvbench.cli.config.search_path import list_choices
from kvbench.core.config import ConfigError, shorten
from kvbench.core.settings import GROUPS

MAX_JOBS = 10**5
"""Most jobs of a sweep."""


def check_overrides(overrides: Sequence[Override]) -> None:
    """Check that overrides remove no key and name choices for groups, each once; Hydra must be initialised.

    Raises:
        ConfigError: naming the key.
    """
    for override in overrides:
        key, _, inner = override.key_or_group.partition(".")
        if not key:
            raise ConfigError(f"{shorten(str(override.input_line))}: has no key; settings are key=value")
        if override.is_delete():
            if key != "hydra" and not (inner and key in GROUPS):
                none = (
                    f"set {key}=none" if key in ("eval", "logger") else "keep the default of conf/config.yaml"
                )
                raise ConfigError(f"{override.key_or_group}: missing; set it, or {none}")
        elif is_about_group(override) and not override.is_sweep_override():
            _check_choices(override)


def check_lists(overrides: Sequence[Override]) -> None:
    """Check that every list of values has at least one, and that a sweep has a number of jobs that can be listed.

    Raises:
        ConfigError: naming the list, or the number of jobs.
    """
    jobs = math.prod(_count_values(override) for override in overrides if override.is_sweep_override())
    if jobs > MAX_JOBS:
        raise ConfigError(f"the lists of values make {jobs} jobs; a sweep has at most {MAX_JOBS}")


def _count_values(override: Override) -> int:
    word = shorten(str(override.input_line))
    if not override.is_discrete_sweep():
        raise ConfigError(f"{word}: a sweep needs single values; write a list, or range(start,stop,step)")
    if override.is_range_sweep():
        given: Any = override.value()
        if not (given.step and math.isfinite(given.start) and math.isfinite(given.stop)):
            raise ConfigError(f"{word}: must have finite ends and a step other than 0")
        count = math.ceil((given.stop - given.start) / given.step)
    else:
        count = sum(1 for _ in override.sweep_string_iterator())
    if count < 1:
        choices = list_choices(override.key_or_group)
        remedy = f"choice; choose from {', '.join(choices)}" if choices else "value; give at least one"
        raise ConfigError(f"{word}: matches no {remedy}")
    return count


def _check_choices(override: Override) -> None:
    """Raise ConfigError if the value of a group is not a choice's name, or for `eval` a list of different ones."""
    group, value = override.key_or_group, override.value()
    names = value if isinstance(value, list) and group == "eval" else [value]
    if not all(isinstance(name, str) for name in names):
        choices = ", ".join(list_choices(group.partition(".")[0]))
        raise ConfigError(f"{shorten(str(override.input_line))}: not a choice; choose from {choices}")
    for number, name in enumerate(names):
        if (other := _find_other_spelling(group, name)) is not None:
            raise ConfigError(f"{group}={shorten(name)}: not the name of a choice; set {group}={other}")
        if name in names[:number]:
            raise ConfigError(f"{shorten(str(override.input_line))}: names {name} twice; leave one out")


def _find_other_spelling(group: str, name: str) -> str | None:
    """Return the name of the choice whose file Hydra also finds by a path; None for a name, or for no choice.

    Runs are named by the choice of `method=`, so that only one spelling is accepted.
    """
    plain = posixpath.normpath(posixpath.join(group, name.lstrip("/")))
    plain = plain.removesuffix(".yaml").removesuffix(".yml").removeprefix(f"{group}/")
    return plain if plain != name and is_choice(group, plain) else None


def is_choice(group: str, name: str) -> bool:
    """Return whether a group has a choice, which may be in a subfolder; Hydra must be initialised."""
    folder, _, file = name.rpartition("/")
    return file in list_choices(posixpath.join(group, folder))


def check_against(against: str, runs_dir: Path) -> None:
    """Check that `against` names a method or the folder of a run; Hydra must be initialised.

    Raises:
        ConfigError: it does not.
    """
    is_folder = bool(against) and "/" not in against and "\0" not in against
    runs = (folder / against for folder in runs_dir.glob("*")) if is_folder else ()
    if not is_choice("method", against) and not any(run.is_dir() for run in runs):
        choices = ", ".join(list_choices("method"))
        raise ConfigError(
            f"against={shorten(against)}: neither a method nor the folder of a run in {runs_dir}; methods: "
            f"{choices}"
        )
