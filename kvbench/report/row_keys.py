"""Keys of a table's rows, beside its CSV file, so that later changes of defaults do not change what a row was."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from kvbench.core.files import write_whole

NAMING = ("model", "method", "prompts", "budget", "budget_unit", "seed", "cache_dtype", "storage", "noise")
"""Keys of a configuration that are part of a run's name."""
SUFFIX = ".keys.jsonl"
"""Suffix of the file's name, in place of the table's `.csv`."""

Composed = tuple[str, Sequence[str] | None, Mapping[str, object]]
"""Name of a row, the overrides that compose it (None if not recorded), and the configuration that they composed."""


def pick_keys(config: Mapping[str, object]) -> dict[str, object]:
    """Return the keys of `NAMING` with their values, without the locations of a model's weights."""
    keys = {name: config[name] for name in NAMING if name in config}
    if isinstance(model := keys.get("model"), Mapping):
        keys["model"] = {name: value for name, value in model.items() if name != "sources"}
    return keys


def write_keys(table: Path, rows: Iterable[Composed]) -> Path:
    """Write a line of JSON for each row beside a table's CSV file: row, overrides and keys; return its path."""
    entries = [
        {"row": row, "overrides": overrides, "keys": pick_keys(config)} for row, overrides, config in rows
    ]
    path = table.with_suffix(SUFFIX)
    write_whole(path, "".join(json.dumps(entry) + "\n" for entry in entries))
    return path
