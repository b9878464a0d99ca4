"""Command that repeats a run, from the recorded overrides that compose it."""

import re
import shlex
from collections.abc import Sequence

from kvbench.core.settings import RUN_KEYS
from kvbench.runs.record.results import Results

KEYS = (*RUN_KEYS, "model", "sampling", "device")
"""Keys and groups of keys that may change a run's samples, costs or metrics."""


def find_key(word: str) -> str:
    """Return the key or group of keys that an override sets, adds or removes.

    >>> find_key("budget=0.1"), find_key("++method.sinks=2"), find_key("method@method.base=h2o")
    ('budget', 'method', 'method')
    """
    return re.split("[.@=]", word.lstrip("+~"))[0]


def select_words(words: Sequence[str]) -> tuple[str, ...] | None:
    """Return the overrides that may change a run; None if one names a class, whose code others may not trust."""
    if any("_target_" in word for word in words):
        return None
    return tuple(word for word in words if find_key(word) in KEYS)


def write_command(run: Results) -> str:
    """Return the command that repeats a run in the default runs_dir; empty if its overrides are not recorded.

    Overrides that `select_words` would not have recorded are not shown, because the record may be a stranger's.
    """
    if run.overrides is None or select_words(run.overrides) != run.overrides:
        return ""
    is_swept = any(find_key(word) == "sweeps" for word in run.overrides)  # `--run`: one job of the sweep
    task = ["task=bounds"] if run.method.startswith("full, ") else []
    return shlex.join(["python", "run.py", *["--run"] * is_swept, *task, *run.overrides])
