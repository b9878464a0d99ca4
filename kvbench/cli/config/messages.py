"""One-line error messages for commands; imports no torch."""

import errno
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, InstantiationException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from kvbench.cli.config.compose import (
    check_runs_dir,
    compose_job,
    hydra_of_kvbench,
    read_settings,
    read_values,
)
from kvbench.cli.config.did_you_mean import did_you_mean, suggest_choice, suggest_key
from kvbench.cli.config.search_path import check_search_path, list_choices
from kvbench.core.config import ConfigError, UserError
from kvbench.core.settings import CHOSEN

EXPECTED = (UserError, ValueError, HydraException, OmegaConfBaseException, OSError)
"""Errors that a user can cause, beside out-of-memory errors."""
COMMANDS = ("run", "multirun", "cfg", "info", "shell_completion")
"""Options of Hydra of which a command has one at most."""


def is_expected(error: BaseException) -> bool:
    """Return whether a user can cause an error, which is then shown in one line; others show its traceback."""
    torch = sys.modules.get("torch")  # what is not imported has raised nothing
    return isinstance(error, EXPECTED) or (torch is not None and isinstance(error, torch.OutOfMemoryError))


def is_one_job(arguments: list[str]) -> bool:
    """Return whether a command holds nothing but overrides: neither `-m` nor a command of Hydra's own."""
    return not any(word.startswith("-") for word in arguments)


def check_arguments(arguments: list[str]) -> str | None:
    """Compose what a command names, every value of every list once; return what is wrong with it, None for nothing."""
    parsed = get_args_parser().parse_args(arguments)
    if len(commands := [f"--{name}" for name in COMMANDS if getattr(parsed, name)]) > 1:
        return f"{' and '.join(commands)}: only one at a time; leave out {commands[0]}"
    runs = parsed.multirun or is_one_job(arguments)  # rather than shows something
    try:
        with hydra_of_kvbench():
            check_search_path()
            for overrides in cover_values(parsed.overrides):
                cfg, _ = compose_job(overrides)
                if runs:
                    check_runs_dir(read_settings(cfg))
            if words := [word for word in parsed.overrides if word.startswith("hydra")]:
                compose_job(words)
    except EXPECTED as error:
        return describe_error(error, parsed.overrides)
    return None


def cover_values(arguments: list[str]) -> list[list[str]]:
    """Return overrides of some jobs of a sweep, in which every value of every list occurs; Hydra must be initialised.

    Raises:
        ConfigError: a list is empty.
    """
    parsed = [
        o
        for o in OverridesParser.create(GlobalHydra.instance().config_loader()).parse_overrides(arguments)
        if not o.key_or_group.startswith("hydra") or o.key_or_group == "hydra.searchpath"
    ]
    listed = [o for o in parsed if o.is_choice_sweep()]
    fixed = [str(o.input_line) for o in parsed if not o.is_sweep_override()]
    swept = [[f"{o.get_key_element()}={value}" for value in o.sweep_string_iterator()] for o in listed]
    for override, values in zip(listed, swept, strict=True):
        if not values:
            choices = ", ".join(list_choices(override.key_or_group))
            raise ConfigError(f"{override.input_line}: matches no choice; choose from {choices}")
    count = max(map(len, swept), default=1)
    return [fixed + [values[i % len(values)] for values in swept] for i in range(count)]


def describe_error(error: BaseException, arguments: Sequence[str] = ()) -> str:
    """Put an expected error into one line; raise its cause where that is our fault.

    Args:
        error: what was raised.
        arguments: words of the command; their choices say which keys there are.
    """
    if isinstance(error, OverrideParseException):
        return f"{error.override}: cannot be read as key=value; quote values that hold one of = , [ ] {{ }} ~"
    if isinstance(error, InstantiationException) and error.__cause__ is not None:
        return _describe_cause(error, error.__cause__)
    if isinstance(error, HydraException | OmegaConfBaseException):
        return _describe_composition(str(error), arguments)
    line = " ".join(str(error).split())
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"{line}; make room: what was done is kept, and the same command goes on with the rest"
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        name = Path(str(error.filename)).name
        key = next((word.partition("=")[0] for word in arguments if name in word), "a path")
        return f"{key}: a name of {len(name)} characters is too long"
    return line


def _describe_cause(error: InstantiationException, cause: BaseException) -> str:
    """Return why an object could not be made out of its configuration."""
    key = re.search(r"full_key: (\S+)", str(error))
    if isinstance(cause, TypeError | ImportError) and key is not None:
        return f"{key[1]}: {' '.join(str(cause).split())}"
    if not is_expected(cause):
        raise cause
    line = describe_error(cause)
    if key is None or re.match(r"\w+(\.\w+)+[:=]", line):
        return line
    return (
        key[1] + ("." if re.match(r"\w+=", line) else ": ") + line
    )  # objects know fields, not where they stand


def _describe_composition(message: str, arguments: Sequence[str]) -> str:
    """Return one line that names the key, out of Hydra's several."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if found := re.match(r"Could not override '(.+)'", lines[0]):
        key = found[1].rpartition("@")[2]
        near = suggest_key(key, _list_keys(arguments))
        if near == key:
            return f"{key}: no such key in what was chosen for {key.partition('.')[0]}"
        return f"{key}: no such key{did_you_mean(near)}"
    if found := re.match(r"Missing mandatory value: (\S+)", lines[0]):
        key = next((line.partition(" ")[2] for line in lines if line.startswith("full_key")), found[1])
        return f"{key}: missing; set {key}=..."
    if found := re.search(r"Could not (?:find|load) '([\w/]+)/(.*?)'", lines[0]):
        group, choice = found.groups()
        with hydra_of_kvbench():
            choices = list_choices(group)
        listed = f"; choose from {', '.join(choices)}" if choices else ""
        return f"{group}={choice}: no such choice{listed}{did_you_mean(suggest_choice(choice, choices))}"
    if found := re.match(r"(?:Ambiguous value for argument|Sweep parameters) '(.+?)'", lines[0]):
        return f"{found[1]}: several values make a sweep, which -m asks for; a list stands in [ ]"
    named = [line for line in lines if line.startswith(("Key '", "full_key"))]
    return " ".join(dict.fromkeys([lines[0], *named]))


def _list_keys(arguments: Sequence[str]) -> list[str]:
    choices = [word for word in arguments if word.partition("=")[0] in CHOSEN]
    with hydra_of_kvbench():
        try:
            values = read_values(compose_job(choices)[0])
        except EXPECTED:  # they have an error of their own, or are several
            values = read_values(compose_job([])[0])
    inner = [
        f"{key}.{name}"
        for key, value in values.items()
        if isinstance(value, dict)
        for name in value
        if name[0] != "_"
    ]
    return [*values, *inner]
