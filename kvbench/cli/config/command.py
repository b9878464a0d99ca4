"""Parsed arguments of a command line."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Literal

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from kvbench.core.config import ConfigError

MULTIRUN = ("-m", "--multirun")
BESIDE = "beside."
"""Prefix of the keys of a sweep's reference jobs."""
SHORT_FORMS = dict.fromkeys(("-v", "--verbose"), "verbose=true")
"""Options and words that abbreviate an override."""
SWEEP_TASKS = ("work", "status", "report")
"""Tasks that concern a sweep as a whole, not its jobs."""
ALL_RUNS_TASKS = ("dashboard", "export")
"""Tasks about every run, even if the command names a sweep."""
FOLDER_KEYS = ("work.folder", "sweep.name")
"""Keys that find a sweep which was started before."""
OTHER_VALUES = ("null", "true", "false", "nan", "inf")
"""Words that Hydra's command line does not parse as strings."""


@dataclass(frozen=True)
class Command:
    """A command line of overrides and options.

    Attributes:
        words: all words, short forms expanded.
        overrides: `words` without `-m`.
        options: options of Hydra other than `-m`, such as `--cfg`.
        task: value of `task=`; None if it is not given.
        lists: overrides that list several values, as in a sweep.
        names_sweep: whether `sweeps=` chooses a sweep and the task is about its jobs.
        finds_sweep: whether words name a sweep, its folder, or list its values.
        kind: what the command is about: an `option` of Hydra, one `job`, the `jobs` of a sweep, a `sweep` as a whole,
            or `all` runs or sweeps.
    """

    words: tuple[str, ...]
    overrides: tuple[str, ...]
    options: tuple[str, ...]
    task: str | None
    lists: tuple[str, ...]
    names_sweep: bool
    finds_sweep: bool
    kind: Literal["option", "job", "jobs", "sweep", "all"]

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> "Command":
        """Parse the words of a command line.

        Raises:
            ConfigError: see `name_file`.
        """
        words = tuple(name_base(SHORT_FORMS.get(word, word)) for word in arguments)
        if any(word.startswith("sweeps=") for word in words):
            words = name_file(words)
        if any("," in word or word.startswith(BESIDE) for word in words):
            words = list_single_values(words)
        overrides = tuple(word for word in words if word not in MULTIRUN)
        options = tuple(word for word in overrides if word.startswith("-"))
        values = dict(word.split("=", 1) for word in overrides if "=" in word)
        task = values.get("task")
        lists = tuple(str(one.input_line) for one in _parse(overrides) if one.is_sweep_override())
        names_sweep = values.get("sweeps", "null") != "null" and task not in ALL_RUNS_TASKS
        finds_sweep = names_sweep or bool(lists) or not values.keys().isdisjoint(FOLDER_KEYS)
        kind: Literal["option", "job", "jobs", "sweep", "all"] = "job"
        if options:
            kind = "option"
        elif task in ALL_RUNS_TASKS or (task in ("report", "status") and not finds_sweep):
            kind = "all"
        elif task in SWEEP_TASKS:
            kind = "sweep"
        elif names_sweep or len(overrides) < len(words):
            kind = "jobs"
        return cls(words, overrides, options, task, lists, names_sweep, finds_sweep, kind)


def name_base(word: str) -> str:
    """Return an override that chooses a method's base, or prompts, by name in Hydra's syntax; return others unchanged.

    >>> name_base("method.base=h2o"), name_base("method.base.base=rkv,h2o"), name_base("method.base.sinks=2")
    ('method@method.base=h2o', 'method@method.base.base=rkv,h2o', 'method.base.sinks=2')
    >>> name_base("prompts.of=scenes")
    'prompts@prompts.of=scenes'
    """
    word = re.sub(r"^prompts\.of=(?=[a-z])", "prompts@prompts.of=", word)
    return re.sub(r"^method((?:\.base)+)=(?=[a-z_])", r"method@method\1=", word)


def name_file(words: Sequence[str]) -> tuple[str, ...]:
    """Replace a `sweeps=` folder that has a file per model by the file of the command's model.

    >>> name_file(["-m", "sweeps=first_light", "model=var_d16"])
    ('-m', 'sweeps=first_light/var_d16', 'model=var_d16')

    Raises:
        ConfigError: the folder has no file of that name, or the command names no model.
    """
    values = dict(word.split("=", 1) for word in words if "=" in word)
    name, model = values.get("sweeps", ""), values.get("model", "")
    folder = files("kvbench.conf").joinpath("sweeps", name)
    if not re.fullmatch(r"\w+", name) or not folder.is_dir():
        return tuple(words)
    known = sorted(one.name.removesuffix(".yaml") for one in folder.iterdir() if one.name.endswith(".yaml"))
    if model not in known:
        given = f"has no file for model={model}" if model else "has a file for each model; add model="
        raise ConfigError(f"sweeps={name}: {given}; there are {', '.join(known)}")
    return tuple(f"sweeps={name}/{model}" if word == f"sweeps={name}" else word for word in words)


def list_single_values(words: Sequence[str]) -> tuple[str, ...]:
    """Return the words of a command, with values of keys in groups of several choices as lists of one.

    Hydra composes the shared part of a sweep without its lists. There, the group has the choice of conf/config.yaml, to
    which the key may be unknown. Only the reference jobs have keys that begin with `beside.`.

    >>> list_single_values(["-m", "method=pricekv,lukv", "method.queries=32", "budget=0.1"])
    ('-m', 'method=pricekv,lukv', 'method.queries=choice(32)', 'budget=0.1')
    """
    parsed = {str(override.input_line): override for override in _parse(words)}
    groups = (BESIDE, *(f"{_find_key(one)}." for one in parsed.values() if one.is_sweep_override()))
    single = {word: one for word, one in parsed.items() if not (one.is_sweep_override() or one.is_delete())}
    inner = {word for word, one in single.items() if _find_key(one).startswith(groups)}
    pairs = ((word, word.partition("=")) for word in words)
    return tuple(
        f"{key}=choice({value.strip() or repr('')})" if word in inner else word
        for word, (key, _, value) in pairs
    )


def _parse(words: Sequence[str]) -> list[Override]:
    """Parse the overrides among words; empty if one cannot be parsed, which composition reports."""
    try:
        return OverridesParser.create().parse_overrides(
            [word for word in words if word[:1] == "~" or ("=" in word and word[:1] != "-")]
        )
    except HydraException:
        return []


def _find_key(override: Override) -> str:
    """Return the key that an override sets; for a choice of a group, the key where it is placed."""
    return override.package or override.key_or_group


def write_value(value: object) -> str:
    """Return a setting in the syntax of Hydra's command line.

    Raises:
        TypeError: the setting is neither a JSON value nor a path; the message is its type.
    """
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{write_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(write_value, value)) + "]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return repr(value)
    if not isinstance(value, str | Path):
        raise TypeError(type(value).__name__)
    text = str(value)
    if re.fullmatch(r"[A-Za-z_/][\w./:-]*", text) and text.lower() not in OTHER_VALUES:
        return text
    return "'" + re.sub(r"(\\+)(?='|\Z)", r"\1\1", text).replace("'", r"\'") + "'"
