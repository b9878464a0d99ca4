"""Checks of the words of a command before a configuration is composed, with one-line errors."""

import math
import posixpath
import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.types import Override

from kvbench.cli.config.command import BESIDE, SWEEP_TASKS, Command
from kvbench.cli.config.loader import is_about_group
from kvbench.cli.config.search_path import list_choices
from kvbench.core.config import ConfigError, shorten
from kvbench.core.settings import GROUPS, RUN_KEYS, TASKS
from kvbench.core.storage import CODE_DTYPES
from kvbench.core.suggestions import suggest

UNSUPPORTED = ("config_path", "config_name", "config_dir", "experimental_rerun")
"""Hydra's options that would replace kvbench's configuration."""
OPTIONS = "-m, -v, --help, --version, --cfg, --info and --shell-completion"
"""Options that error messages list."""

MAX_JOBS = 10**5
"""Maximum number of jobs of a sweep."""
METHOD_GROUPS = ("method", "calibrate")
"""Groups of keys that configure methods; a sweep's reference jobs leave them out."""

SWEEP, TABLE = "-m", "plan.table"
"""Readers of a key that are not tasks: a sweep of jobs, and a paper's table."""
ALL, SWEEPS = (*TASKS, TABLE), (SWEEP, *SWEEP_TASKS)
RUNS = ("run", "evaluate", "bounds", "choose", "plan", "check", "calibrate", "profile", SWEEP)
"""Tasks that read the settings of a run."""
READERS: Mapping[str, Sequence[str]] = {
    "prompts.count": (*RUNS, "report"),
    **dict.fromkeys((*RUN_KEYS, "logger", "require", "shard"), RUNS),
    **dict.fromkeys(("model", "sampling"), (*RUNS, "weights", "train")),
    "runs_dirs": (*RUNS, "dashboard"),
    **dict.fromkeys(("choose", "metric", "methods", "margin"), ("choose",)),
    **{task: (task,) for task in ("dashboard", "export", "profile", "train")},
    "plan": ("plan", TABLE),
    "from": ("merge",),
    "output": ("report", "dashboard", "export"),
    **dict.fromkeys(("against", "published", "report"), ("report", SWEEP)),
    "sweep": (*SWEEPS, "dashboard"),
    "work.folder": (*SWEEP_TASKS, "dashboard"),
    **dict.fromkeys(("work.do", "work.run", "work.number", "work.workers"), ("work",)),
    **dict.fromkeys(("work.grace", "work.jitter"), ("work", SWEEP)),
    **dict.fromkeys(("hydra.searchpath", "hydra.verbose", "hydra.job_logging", "hydra/job_logging"), ALL),
    **dict.fromkeys(("hydra/launcher", "hydra.launcher", "hydra.job.env_set", "hydra.job.env_copy"), SWEEPS),
    **dict.fromkeys(("hydra/hydra_logging", "hydra.hydra_logging"), SWEEPS),
    "hydra": (),
}
"""Readers by key or group of keys; the first match counts. Every task reads all other keys."""
OWN_KEYS = {
    ("calibrate", "seed"): "calibrate.seed",
    ("calibrate", "batch_size"): "calibrate.batch_size",
    ("profile", "batch_size"): "profile.batch_sizes",
    ("choose", "method"): "methods=[...]",
}
"""A task's own key that replaces a key of runs."""
REMEDIES: Mapping[str, str] = {
    **dict.fromkeys(("hydra.run", "hydra.sweep"), "set runs_dir= for the folder of runs"),
    **dict.fromkeys(("hydra.output_subdir", "hydra/output"), "every run folder holds its config.yaml"),
    **dict.fromkeys(("hydra.sweeper", "hydra/sweeper"), "write lists of values, here or in conf/sweeps"),
    **dict.fromkeys(("hydra.callbacks", "hydra/callbacks"), "write a logger (docs/extending.md)"),
    "hydra.mode": "add -m for a sweep",
}
"""Remedies by key, for keys of Hydra that kvbench does not read."""
OF_SWEEPS = (
    "sweeps", "sweep", "work", "report", "against", "published", "output", "verbose", "runs_dir", "hydra"
)  # fmt: skip
"""Keys and groups that have one value for a whole sweep, not a value per job."""


def parse_options(arguments: Sequence[str]) -> Namespace:
    """Parse the words of a command as Hydra does.

    Raises:
        ConfigError: an option is unknown, lacks its value, or does not fit the others.
    """
    parser = get_args_parser()
    known = {name for one in parser._actions if one.dest not in UNSUPPORTED for name in one.option_strings}
    for word in arguments:
        if word.startswith("-") and word.partition("=")[0] not in known:
            raise ConfigError(f"{shorten(word)}: no such option; there are {OPTIONS}; settings are key=value")
    parser.error = _refuse  # type: ignore[method-assign,assignment]
    parsed = parser.parse_intermixed_args(list(arguments))
    if parsed.package and parsed.cfg is None:  # Hydra, which checks the other options, would run the job
        raise ConfigError("--package: only with --cfg; add --cfg job, or leave it out")
    return parsed


def _refuse(message: str) -> None:
    """Raise a message of argparse as ConfigError."""
    raise ConfigError(re.sub(r"^argument (--[\w-]+)(/-\w+)?", r"\1", " ".join(message.split())))


def check_words(command: Command) -> None:
    """Check that every key that a command sets changes something.

    Raises:
        ConfigError: the task does not read a key, or not a list of values, or storage settings have no effect.
    """
    if command.options:
        return
    for word in command.lists:
        if command.kind == "all" or _find_name(_name_key(word), OF_SWEEPS):
            raise ConfigError(f"{shorten(word)}: takes one value; start one command for each")
    keys = [key for word in command.overrides if (key := _name_key(word))]
    task, acting = command.task or "run", _list_acting(command, keys)
    for key in keys:
        if (own := OWN_KEYS.get((task, key.partition(".")[0]))) is not None:
            raise ConfigError(f"{key}: not read by task={task}; set {own}")
        if (name := _find_name(key, READERS)) is None:
            continue
        readers = READERS[name]
        if not readers:
            remedy = REMEDIES.get(_find_name(key, REMEDIES) or "", "leave it out")
            raise ConfigError(f"{key}: not read by kvbench; {remedy}")
        if acting.isdisjoint(readers) and task in TASKS:
            of_sweeps = task in RUNS and task not in readers and SWEEP in readers
            reason = "only for sweeps; add -m, or" if of_sweeps else f"not read by task={task};"
            other = "; sweep.name= or work.folder= chooses the runs of a sweep" * (task == "report")
            raise ConfigError(f"{key}: {reason} leave it out{other}")
    dtypes = " ".join(word for word in command.overrides if _name_key(word) == "cache_dtype")
    given = [key for key in keys if _find_name(key, ("storage",))]  # files of sweeps may set the dtype
    if given and not command.names_sweep and not any(dtype in dtypes for dtype in CODE_DTYPES):
        raise ConfigError(f"{given[0]}: has no effect in 16 bits; set cache_dtype=int4, or leave it out")


def _list_acting(command: Command, keys: Sequence[str]) -> set[str]:
    """Return the readers that a command has; the file of a sweep may set the task of its jobs."""
    task = command.task or "run"
    if TABLE in keys:
        return {TABLE}
    if "export.policy" in keys:
        return {task, "run"}
    if task in SWEEP_TASKS:
        return {task, *RUNS} if task == "work" or command.finds_sweep else {task}
    if command.names_sweep and command.task is None:
        return {*RUNS}
    sweeps = command.kind == "jobs" and (task in RUNS or task not in TASKS)
    return {task, SWEEP} if sweeps else {task}


def is_read(key: str, task: str) -> bool:
    """Return whether a task reads a key, other than from a sweep."""
    name = _find_name(key, READERS)
    own = key != "task" and (task, key.partition(".")[0]) not in OWN_KEYS
    return own and (task in READERS[name] if name else not key.startswith("work."))


def _name_key(word: str) -> str:
    """Return the key that a word sets or removes, without Hydra's signs and the prefix of reference methods."""
    sets = not word.startswith("-") and ("=" in word or word.startswith("~"))
    return word.lstrip("+~").partition("=")[0].partition("@")[0].removeprefix(BESIDE) if sets else ""


def _find_name(key: str, names: Mapping[str, object] | Sequence[str]) -> str | None:
    """Return the first of some keys and groups of keys that equals or contains a key; None if none does."""
    return next((name for name in names if re.match(rf"{re.escape(name)}([./]|$)", key)), None)


def check_overrides(overrides: Sequence[Override]) -> None:
    """Check that overrides remove no key and name choices for groups, each once; Hydra must be initialised.

    Raises:
        ConfigError: an override has no key, removes one, or names no choice or one twice.
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


def split_beside(overrides: Sequence[Override]) -> list[list[Override]]:
    """Return the overrides of a sweep's jobs, followed by the overrides of its reference jobs.

    Reference jobs have the words below `beside.`, such as `beside.method` and `beside.budget`, in place of words of the
    same names and of every setting of the sweep's methods. Thus a sweep over the settings of one method can include
    another method that lacks them.

    Raises:
        ConfigError: reference jobs have no method.
    """
    beside = [word for word in overrides if f"{word.key_or_group}.".startswith(BESIDE)]
    own = [word for word in overrides if word not in beside]
    if not beside:
        return [own]
    cut = len(BESIDE)
    renamed = [
        replace(word, key_or_group=word.key_or_group[cut:], input_line=str(word.input_line)[cut:])
        for word in beside
    ]
    replaced = {word.key_or_group for word in renamed}
    if "method" not in replaced:  # also if the key is `beside` alone
        raise ConfigError(
            f"{beside[0].key_or_group}: jobs beside a sweep have their own method; set beside.method"
        )
    kept = (word for word in own if word.key_or_group not in replaced)
    return [
        own,
        [*(word for word in kept if word.key_or_group.partition(".")[0] not in METHOD_GROUPS), *renamed],
    ]


def check_lists(overrides: Sequence[Override]) -> None:
    """Check that every list has a value, and that a sweep has at most `MAX_JOBS` jobs.

    Raises:
        ConfigError: a list has no value, or there are too many jobs; the message names the list or their number.
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
        group = override.key_or_group
        remedy = f"choice{suggest('', choices, group)}" if choices else "value; give at least one"
        raise ConfigError(f"{word}: matches no {remedy}")
    return count


def _check_choices(override: Override) -> None:
    """Raise ConfigError if the value of a group is not a choice's name or, for `eval`, a list of distinct names."""
    group, value = override.key_or_group, override.value()
    names = value if isinstance(value, list) and group == "eval" else [value]
    if not all(isinstance(name, str) for name in names):
        plain = group.partition(".")[0]
        choices = suggest("", list_choices(plain), plain)
        raise ConfigError(f"{shorten(str(override.input_line))}: not a choice{choices}")
    for number, name in enumerate(names):
        # Hydra also finds a choice's file by a path; runs are named by the choice, so one spelling is accepted.
        plain = posixpath.normpath(posixpath.join(group, name.lstrip("/")))
        plain = plain.removesuffix(".yaml").removesuffix(".yml").removeprefix(f"{group}/")
        if plain != name and is_choice(group, plain):
            raise ConfigError(f"{group}={shorten(name)}: not the name of a choice; set {group}={plain}")
        if name in names[:number]:
            raise ConfigError(f"{shorten(str(override.input_line))}: names {name} twice; leave one out")


def is_choice(group: str, name: str) -> bool:
    """Return whether a group has a choice, which may be in a subfolder; Hydra must be initialised."""
    folder, _, file = name.rpartition("/")
    return file in list_choices(posixpath.join(group, folder))


def check_against(against: str, runs_dir: Path) -> None:
    """Check that `against` names a method or the folder of a run; Hydra must be initialised.

    Raises:
        ConfigError: `against` names neither.
    """
    is_folder = bool(against) and "/" not in against and "\0" not in against
    runs = (folder / against for folder in runs_dir.glob("*")) if is_folder else ()
    if not is_choice("method", against) and not any(run.is_dir() for run in runs):
        methods = suggest(against, list_choices("method"), "method")
        raise ConfigError(
            f"against={shorten(against)}: neither a method nor the folder of a run in {runs_dir}{methods}"
        )
