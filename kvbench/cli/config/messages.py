"""One-line error messages for commands; imports no torch."""

import errno
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, InstantiationException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from kvbench.cli.config.checks import check_runs_dir
from kvbench.cli.config.command import Command, name_base
from kvbench.cli.config.compose import check_values, compose_job, find_finished, hydra_of_kvbench, read_values
from kvbench.cli.config.loader import parse_words
from kvbench.cli.config.search_path import check_search_path, describe_slip, find_added, list_choices
from kvbench.cli.config.words import check_lists, parse_options, split_beside
from kvbench.core.config import ConfigError, UserError, shorten
from kvbench.core.settings import CHOICE_KEYS
from kvbench.core.suggestions import suggest

EXPECTED = (UserError, ValueError, HydraException, OmegaConfBaseException, OSError, YAMLError)
"""Errors that a user can cause, besides out-of-memory errors."""
MAX_LINE = 1200
"""Maximum number of characters of a message."""
ALIKE = 0.75
"""Minimum similarity of a suggested key; keys of one group share the group's name."""


def is_expected(error: BaseException) -> bool:
    """Return whether a user can cause an error; it is then shown in one line, otherwise with a traceback."""
    torch = sys.modules.get("torch")  # torch raised nothing if it is not imported
    return isinstance(error, EXPECTED) or (torch is not None and isinstance(error, torch.OutOfMemoryError))


def check_arguments(arguments: list[str]) -> str | None:
    """Compose the jobs of a command, every value of every list once; return the first error as a line, or None.

    Settings of a finished run are known to be valid; checking others imports their classes and torch.
    """
    job: Sequence[str] = ()
    try:
        parsed = parse_options(arguments)
        words = job = parsed.overrides
        if parsed.shell_completion:
            return None  # Hydra checks the words
        runs = parsed.cfg is None and (parsed.multirun or Command.parse(arguments).kind != "option")
        of_hydra = [word for word in words if word.lstrip("+~").startswith("hydra")]
        with hydra_of_kvbench():
            check_search_path()
            for job in cover_values([*_list_added_words(words), *words]):
                cfg, _ = compose_job(job)
                if runs and not ((values := read_values(cfg)).get("task") == "run" and find_finished(values)):
                    check_runs_dir(check_values(values))
            if of_hydra:
                compose_job(of_hydra)
    except EXPECTED as error:
        return describe_error(error, job)
    return None


def _list_added_words(words: Sequence[str]) -> list[str]:
    """Return an added folder's sweep overrides whose keys the command does not set; kvbench's own are valid."""
    if not find_added("sweeps", words):
        return []
    chosen = [word for word in words if word.startswith(("sweeps=", "hydra.searchpath="))]
    params = compose_job(chosen)[1].sweeper.params or {}
    given = [word.partition("=")[0] for word in words]
    return [f"{key}={value}" for key, value in params.items() if key not in given]


def cover_values(arguments: list[str]) -> list[list[str]]:
    """Return the overrides of few jobs that together have every value of every list; Hydra must be initialised.

    Raises:
        ConfigError: see `check_lists` and `split_beside`.
    """
    parsed = [
        o
        for o in parse_words(arguments)
        if not o.key_or_group.startswith("hydra") or o.key_or_group == "hydra.searchpath"
    ]
    check_lists(parsed)
    jobs = []
    for part in split_beside(parsed):
        values = [_list_words(override) for override in part]
        count = max(map(len, values), default=1)
        jobs += [[words[i % len(words)] for words in values] for i in range(count)]
    return jobs


def _list_words(override: Override) -> list[str]:
    """Return an override's values as overrides of single jobs; for a range, its two ends."""
    if not override.is_sweep_override():
        return [str(override.input_line)]
    values: Iterable[object] = override.sweep_string_iterator()
    given: Any = override.value()
    if override.is_range_sweep() and isinstance(numbers := given.range(), range):
        values = dict.fromkeys((numbers[0], numbers[-1]))
    return [f"{override.get_key_element()}={value}" for value in values]


def describe_error(error: BaseException, arguments: Sequence[str] = ()) -> str:
    """Return an expected error as one line of bounded length; raise its cause if no user can cause it.

    Args:
        error: the error.
        arguments: words of the command; their choices of groups determine the valid keys.
    """
    return shorten(_describe(error, arguments), MAX_LINE)


def _describe(error: BaseException, arguments: Sequence[str]) -> str:
    if isinstance(error, OverrideParseException):
        return f"{error.override}: not a valid key=value; quote values with any of = , [ ] {{ }} ~"
    if isinstance(error, InstantiationException) and error.__cause__ is not None:
        return _name_files(_describe_cause(error, error.__cause__), arguments)
    if isinstance(error, HydraException | OmegaConfBaseException):
        message = str(error) or str(error.__cause__) or type(error).__name__
        return _name_files(_describe_composition(message, error.__cause__, arguments), arguments)
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem_mark.name}: {describe_slip(error)}"
    line = " ".join(str(error).split())
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"{line}; free disk space and run the same command again to resume"
    return _name_files(line, arguments) if isinstance(error, ConfigError) else line


def _describe_cause(error: InstantiationException, cause: BaseException) -> str:
    """Return one line about an object that could not be instantiated."""
    key = re.search(r"full_key: (\S+)", str(error))
    if isinstance(cause, TypeError | ImportError) and key is not None:
        return f"{key[1]}: {' '.join(str(cause).split())}"
    if not is_expected(cause):
        raise cause
    line = _describe(cause, ())
    if key is None or re.match(r"\w+(\.\w+)+[:=]", line):
        return line
    # the message of an object begins with its field, without the object's key
    return key[1] + ("." if re.match(r"\w+=", line) else ": ") + line


def _describe_composition(message: str, cause: BaseException | None, arguments: Sequence[str]) -> str:
    """Return one line that names the key, from the lines of Hydra's message and of its cause."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if match := re.match(r"Could not (?:override|delete from config\.) '(.+?)'", lines[0]):
        key, keys = match[1].rpartition("@")[2], _list_keys(arguments)
        group, dot, rest = key.partition(".")
        whole = [one for one in reversed(keys) if one.endswith(f".{key}")]  # groups' keys first
        inner = [one for one in keys if dot and one.startswith(f"{group}.") and one.endswith(f".{rest}")]
        near = [one for one in get_close_matches(key, keys, 3, ALIKE) if one.count(".") == key.count(".")]
        meant = " or ".join(whole or inner or near[:1])
        chosen = (f" with {word}" for word in arguments if dot and word.startswith(f"{group}="))
        return f"{key}: no such key" + (f"; did you mean {meant}?" if meant else next(chosen, ""))
    if match := re.match(r"Missing mandatory value: (\S+)", lines[0]):
        key = next((line.partition(" ")[2] for line in lines if line.startswith("full_key")), match[1])
        return f"{key}: missing; set {key}=..."
    if match := re.search(r"Could not (?:find|load) '([\w/]+)/(.*?)'", lines[0]):
        group, choice = match.groups()
        with hydra_of_kvbench():
            choices = list_choices(group)
        return f"{group}={choice}: no such choice{suggest(choice, choices, group)}"
    if match := re.match(r"You must specify '\w+@([\w.]+)'", lines[0]):
        return f"{match[1]}: missing; set {match[1]}=... to a choice of {match[1].partition('.')[0]}"
    if match := re.match(r"(?:Ambiguous value for argument|Sweep parameters) '(.+?)'", lines[0]):
        return f"{match[1]}: several values are a sweep; add -m, or write a list as [ ]"
    if (match := re.match(r"Error merging override (.+)", lines[0])) and cause is not None:
        return f"{shorten(match[1])}: {str(cause).splitlines()[0]}"
    return _name_key(lines)


def _name_key(lines: Sequence[str]) -> str:
    """Return Hydra's own lines as one line, which begins with the key if a line names it."""
    key = next((line.partition(" ")[2] for line in lines if line.startswith("full_key")), None)
    line = " ".join(dict.fromkeys([lines[0], *(line for line in lines if line.startswith("Key '"))]))
    return line if key is None or line.startswith(key) else f"{key}: {line}"


def _name_files(line: str, arguments: Sequence[str]) -> str:
    """Return a message about a key with the added files that words choose for the key's group, or as a sweep."""
    group = re.split(r"[.:=]", line)[0]
    if line.startswith(f"{group}://"):  # the line begins with a file
        return line
    try:
        with hydra_of_kvbench():
            found = find_added(group, arguments) if group in CHOICE_KEYS else ()
            files = [file for file in found or find_added("sweeps", arguments) if file not in line]
    except Exception:  # a package on the search path is broken, which the line already says
        return line
    return f"{line}; see {', '.join(files)}" if files else line


def _list_keys(arguments: Sequence[str]) -> list[str]:
    choices = [
        word if "[" in word else word.partition(",")[0]  # the first value of a sweep
        for word in map(name_base, arguments)
        if re.split("[@=]", word)[0] in CHOICE_KEYS
    ]
    with hydra_of_kvbench():
        try:
            values = read_values(compose_job(choices)[0])
        except EXPECTED:  # wrong choices, or lists
            values = read_values(compose_job([])[0])
    return [*_flatten(values, "")]


def _flatten(values: Mapping[str, object], prefix: str) -> Iterator[str]:
    """Yield the keys of a configuration with dots, groups before what they hold."""
    for name, value in values.items():
        if name[0] != "_":
            yield prefix + name
            yield from _flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else ()
