"""Words of a command that change nothing, each refused in one line before any work."""

import re
from collections.abc import Mapping, Sequence

from kvbench.cli.config.command import SWEEP_TASKS, Command
from kvbench.core.config import ConfigError, shorten
from kvbench.core.settings import TASKS
from kvbench.core.storage import CODE_DTYPES

SWEEP, TABLE = "-m", "plan.table"
"""A sweep of jobs and a paper's table, among the readers of a key."""
ALL, SWEEPS = (*TASKS, TABLE), (SWEEP, *SWEEP_TASKS)
RUNS = ("run", "evaluate", "bounds", "choose", "plan", "check", "calibrate", "profile", SWEEP)
"""Tasks on the settings of a run."""
OF_RUNS = (
    "method", "protect", "windows", "storage", "prompts", "eval", "logger", "budget", "budget_unit", "sinks", "seed",
    "shuffle", "batch_size", "cache_dtype", "noise", "cuda_graph", "batch_invariant", "require", "smoke", "shard",
    "calibrate", "sweeps",
)  # fmt: skip
"""Keys of runs, besides those of their model."""
READERS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(OF_RUNS, RUNS),
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
"""Readers of keys and of groups of keys, of which the first that fits counts; every task reads all other keys."""
OWN_KEYS = {
    ("calibrate", "seed"): "calibrate.seed",
    ("calibrate", "batch_size"): "calibrate.batch_size",
    ("profile", "batch_size"): "profile.batch_sizes",
}
"""Keys that a task has in place of one of runs."""
REMEDIES: Mapping[str, str] = {
    **dict.fromkeys(("hydra.run", "hydra.sweep"), "set runs_dir= for the folder of runs"),
    **dict.fromkeys(("hydra.output_subdir", "hydra/output"), "every run folder holds its config.yaml"),
    **dict.fromkeys(("hydra.sweeper", "hydra/sweeper"), "write lists of values, here or in conf/sweeps"),
    **dict.fromkeys(("hydra.callbacks", "hydra/callbacks"), "write a logger (docs/extending.md)"),
    "hydra.mode": "add -m for a sweep",
}
"""Remedies for keys of Hydra that kvbench does not read."""
OF_SWEEPS = (
    "sweeps", "sweep", "work", "report", "against", "published", "output", "verbose", "runs_dir", "hydra"
)  # fmt: skip
"""Keys and groups that a sweep has once, whatever its jobs have."""


def check_words(command: Command) -> None:
    """Check that every key that a command sets changes something.

    Raises:
        ConfigError: the task does not read a key, or one of several values, or the cache has no few bits.
    """
    if command.options:
        return
    for word in command.list_sweeps():
        if command.is_about_all_runs or _find_name(_name_key(word), OF_SWEEPS):
            raise ConfigError(f"{shorten(word)}: a command reads one value of it; start one for each")
    keys = [key for word in command.overrides if (key := _name_key(word))]
    task, acting = command.task or "run", _list_acting(command, keys)
    for key in keys:
        if (own := OWN_KEYS.get((task, key))) is not None:
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
            raise ConfigError(f"{key}: {reason} leave it out")
    _check_storage(command, keys)


def _list_acting(command: Command, keys: Sequence[str]) -> set[str]:
    """Return what reads the keys of a command; the file of a sweep may set the task of its jobs."""
    task = command.task or "run"
    if TABLE in keys:
        return {TABLE}
    if "export.policy" in keys:
        return {task, "run"}
    if task in SWEEP_TASKS:
        return {task, *RUNS} if task == "work" or command.finds_sweep() else {task}
    if command.names_sweep and command.task is None:
        return {*RUNS}
    sweeps = (command.multirun or command.names_sweep) and (task in RUNS or task not in TASKS)
    return {task, SWEEP} if sweeps else {task}


def _check_storage(command: Command, keys: Sequence[str]) -> None:
    """Refuse settings of storage if no job of a command stores few bits; files of sweeps may set them."""
    dtypes = " ".join(word for word in command.overrides if _name_key(word) == "cache_dtype")
    given = [key for key in keys if _find_name(key, ("storage",))]
    if given and not command.names_sweep and not any(dtype in dtypes for dtype in CODE_DTYPES):
        raise ConfigError(f"{given[0]}: has no effect in 16 bits; set cache_dtype=int4, or leave it out")


def _name_key(word: str) -> str:
    """Return the key that a word sets or removes, without Hydra's signs and the prefix of reference methods."""
    sets = not word.startswith("-") and ("=" in word or word.startswith("~"))
    return word.lstrip("+~").partition("=")[0].partition("@")[0].removeprefix("beside.") if sets else ""


def _find_name(key: str, names: Mapping[str, object] | Sequence[str]) -> str | None:
    """Return the first of some keys and groups of keys that a key is, or is below; None for no such key."""
    return next((name for name in names if re.match(rf"{re.escape(name)}([./]|$)", key)), None)
