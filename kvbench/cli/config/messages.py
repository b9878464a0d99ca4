"""One-line error messages for commands; imports no torch."""

import errno
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, InstantiationException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from kvbench.cli.config.command import Command
from kvbench.cli.config.compose import (
    check_runs_dir,
    check_values,
    compose_job,
    find_finished,
    hydra_of_kvbench,
    read_values,
)
from kvbench.cli.config.did_you_mean import did_you_mean, suggest_choice, suggest_key
from kvbench.cli.config.search_path import check_search_path, list_choices
from kvbench.core.config import ConfigError, UserError
from kvbench.core.settings import CHOICE_KEYS

EXPECTED = (UserError, ValueError, HydraException, OmegaConfBaseException, OSError)
"""Errors that a user can cause, besides out-of-memory errors."""
COMMANDS = ("run", "multirun", "cfg", "info", "shell_completion")
"""Options of Hydra that exclude each other."""
SHELLS = ("bash", "fish", "zsh")
"""Shells for which Hydra completes words."""


def is_expected(error: BaseException) -> bool:
    """Return whether a user can cause an error; it is then shown in one line, otherwise with a traceback."""
    torch = sys.modules.get("torch")  # if not imported, it raised nothing
    return isinstance(error, EXPECTED) or (torch is not None and isinstance(error, torch.OutOfMemoryError))


def check_arguments(arguments: list[str]) -> str | None:
    """Compose the jobs of a command, every value of every list once; return the first error as a line, or None.

    Settings of a finished run are known to be valid; checking others imports their classes and torch.
    """
    parsed = get_args_parser().parse_args(arguments)
    if len(commands := [f"--{name}" for name in COMMANDS if getattr(parsed, name)]) > 1:
        return f"{' and '.join(commands)}: exclude each other; leave out {commands[0]}"
    if parsed.shell_completion:
        return _check_completion(parsed.overrides)
    runs = parsed.multirun or Command.parse(arguments).is_one_job
    try:
        with hydra_of_kvbench():
            check_search_path()
            for overrides in cover_values(parsed.overrides):
                cfg, _ = compose_job(overrides)
                if runs and not ((values := read_values(cfg)).get("task") == "run" and find_finished(values)):
                    check_runs_dir(check_values(values))
            if words := [word for word in parsed.overrides if word.startswith("hydra")]:
                compose_job(words)
    except EXPECTED as error:
        return describe_error(error, parsed.overrides)
    return None


def _check_completion(words: Sequence[str]) -> str | None:
    """Return what is wrong with the words of `--shell_completion`; None if they are valid."""
    if re.fullmatch(f"(install|uninstall|query)=({'|'.join(SHELLS)})", " ".join(words)):
        return None
    given = f"{' '.join(words)}: " if words else ""
    return f"-sc: {given}must be one of install, uninstall or query with one of {', '.join(SHELLS)}: -sc install=bash"


def cover_values(arguments: list[str]) -> list[list[str]]:
    """Return overrides of as few jobs as contain every value of every list; Hydra must be initialised.

    Raises:
        ConfigError: a list is empty.
    """
    parsed = [
        o
        for o in OverridesParser.create(GlobalHydra.instance().config_loader()).parse_overrides(arguments)
        if (not o.key_or_group.startswith("hydra") or o.key_or_group == "hydra.searchpath")
        and (o.is_choice_sweep() or not o.is_sweep_override())
    ]
    values = [_list_words(override) for override in parsed]
    for override, words in zip(parsed, values, strict=True):
        if not words:
            choices = ", ".join(list_choices(override.key_or_group))
            raise ConfigError(f"{override.input_line}: matches no choice; choose from {choices}")
    count = max(map(len, values), default=1)
    return [[words[i % len(words)] for words in values] for i in range(count)]


def _list_words(override: Override) -> list[str]:
    """Return an override's values as overrides of single jobs."""
    if not override.is_sweep_override():
        return [str(override.input_line)]
    return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]


def describe_error(error: BaseException, arguments: Sequence[str] = ()) -> str:
    """Return an expected error as one line; raise its cause if no user can cause it.

    Args:
        error: the error.
        arguments: words of the command; their choices of groups determine the valid keys.
    """
    if isinstance(error, OverrideParseException):
        return f"{error.override}: not a valid key=value; quote values with any of = , [ ] {{ }} ~"
    if isinstance(error, InstantiationException) and error.__cause__ is not None:
        return _describe_cause(error, error.__cause__)
    if isinstance(error, HydraException | OmegaConfBaseException):
        return _describe_composition(str(error), arguments)
    line = " ".join(str(error).split())
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"{line}; free disk space and run the same command again to resume"
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        name = Path(str(error.filename)).name
        key = next((word.partition("=")[0] for word in arguments if name in word), "a path")
        return f"{key}: a name of {len(name)} characters is too long"
    return line


def _describe_cause(error: InstantiationException, cause: BaseException) -> str:
    """Return one line about an object that could not be instantiated."""
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
    )  # an object knows its fields, not their key


def _describe_composition(message: str, arguments: Sequence[str]) -> str:
    """Return one line that names the key, from the lines of Hydra's message."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if match := re.match(r"Could not override '(.+)'", lines[0]):
        key = match[1].rpartition("@")[2]
        near = suggest_key(key, _list_keys(arguments))
        if near == key:
            return f"{key}: no such key in the choice of {key.partition('.')[0]}"
        return f"{key}: no such key{did_you_mean(near)}"
    if match := re.match(r"Missing mandatory value: (\S+)", lines[0]):
        key = next((line.partition(" ")[2] for line in lines if line.startswith("full_key")), match[1])
        return f"{key}: missing; set {key}=..."
    if match := re.search(r"Could not (?:find|load) '([\w/]+)/(.*?)'", lines[0]):
        group, choice = match.groups()
        with hydra_of_kvbench():
            choices = list_choices(group)
        near = did_you_mean(suggest_choice(choice, choices))
        listed = f"{near or ';'} choose from {', '.join(choices)}" if choices else ""
        return f"{group}={choice}: no such choice{listed}"
    if match := re.match(r"You must specify '\w+@([\w.]+)'", lines[0]):
        return f"{match[1]}: missing; set {match[1]}=... to a choice of {match[1].partition('.')[0]}"
    if match := re.match(r"(?:Ambiguous value for argument|Sweep parameters) '(.+?)'", lines[0]):
        return f"{match[1]}: several values are a sweep; add -m, or write a list as [ ]"
    named = [line for line in lines if line.startswith(("Key '", "full_key"))]
    return " ".join(dict.fromkeys([lines[0], *named]))


def _list_keys(arguments: Sequence[str]) -> list[str]:
    choices = [word for word in arguments if word.partition("=")[0] in CHOICE_KEYS]
    with hydra_of_kvbench():
        try:
            values = read_values(compose_job(choices)[0])
        except EXPECTED:  # wrong choices, or lists
            values = read_values(compose_job([])[0])
    inner = [
        f"{key}.{name}"
        for key, value in values.items()
        if isinstance(value, dict)
        for name in value
        if name[0] != "_"
    ]
    return [*values, *inner]
