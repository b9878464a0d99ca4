"""Runs and samples as flat rows: plain values by column, and the types of columns (docs/data.md)."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, fields
from typing import Literal, get_args

from kvbench.runs.record.costs import Cost
from kvbench.runs.record.origins import list_origins
from kvbench.runs.record.results import Latency, Memory, Results

Value = str | float | bool | None
FlatRow = Mapping[str, Value]
"""Values of a row by column."""
ColumnType = Literal["bool", "int", "float", "text"]
ColumnTypes = Mapping[str, ColumnType]
"""Types by column."""

COLUMN_TYPES: Mapping[type, ColumnType] = {bool: "bool", int: "int", float: "float", str: "text"}
SECTIONS = ("method", "model", "prompts", "calibrate", "storage")
"""Groups of the configuration whose settings are columns; `storage` has those that the run used."""
DERIVED_SETTINGS = ("_target_", "_convert_", "name", "transformer", "tokenizer", "sources")
"""Settings without a column: they follow from the names of model, method and prompts, or identify no run."""
METRIC_SUFFIXES = ("", ".low", ".high", ".n")
"""Suffixes of a metric's columns: value, ends of the 95 % interval, number of samples."""


def list_kinds(section: str, kind: type) -> dict[str, ColumnType]:
    """Return the types of a dataclass's fields by column, `<section>.<field>`."""
    columns: dict[str, ColumnType] = {}
    for field in fields(kind):
        arguments = get_args(field.type)  # the values of a Literal
        types = (field.type, *arguments, *map(type, arguments))
        columns[f"{section}.{field.name}"] = next(
            name for kind, name in COLUMN_TYPES.items() if kind in types
        )
    return columns


IDENTITY: Mapping[str, tuple[ColumnType, Callable[[Results], object]]] = {
    "run": ("text", lambda run: run.run),
    "model": ("text", lambda run: run.model),
    "method": ("text", lambda run: run.method),
    "reference": ("text", lambda run: run.reference),
    "prompts": ("text", lambda run: run.prompts_label),
    "n": ("int", lambda run: run.n),
    "budget": ("float", lambda run: run.memory.budget),
    "budget_unit": ("text", lambda run: run.memory.budget_unit),
    "peak": ("float", lambda run: run.memory.peak),
    "byte_peak": ("float", lambda run: run.memory.byte_peak),
    "well_used": ("bool", lambda run: run.memory.well_used),
    "sinks": ("int", lambda run: run.setting("sinks")),
    "shuffle": ("int", lambda run: run.setting("shuffle")),
    "seed": ("int", lambda run: run.setting("seed")),
    "batch_size": ("int", lambda run: run.setting("batch_size")),
    "device": ("text", lambda run: run.setting("device")),
    "cache_dtype": ("text", lambda run: run.setting("cache_dtype")),
    "noise": ("text", lambda run: run.noise),
    "commit": ("text", lambda run: _find_commit(run)),
    "finished": ("text", lambda run: run.finished),
}
"""Type and value of the columns that identify a run."""
FIXED: ColumnTypes = {
    "folder": "text",
    **{name: kind for name, (kind, _) in IDENTITY.items()},
    **list_kinds("memory", Memory),
    **list_kinds("latency", Latency),
}
"""Columns of every frame of runs."""
SAMPLE: ColumnTypes = {
    "folder": "text",
    "index": "int",
    "prompt": "text",
    "seed": "int",
    **{name.removeprefix("sample."): kind for name, kind in list_kinds("sample", Cost).items()},
}
"""Columns of every frame of samples."""


def flatten_run(run: Results) -> dict[str, Value]:
    """Return a run as a row with the settings of `SECTIONS` and without the column `folder`."""
    row = {name: _write(find(run)) for name, (_, find) in IDENTITY.items()} | list_settings(run)
    row |= {f"memory.{name}": value for name, value in asdict(run.memory).items()}
    row |= {f"latency.{name}": value for name, value in asdict(run.latency).items()}
    for name, metric in run.metrics.items():
        values = (metric.value, *(metric.ci95 or (None, None)), None if metric.value is None else metric.n)
        row |= zip((name + end for end in METRIC_SUFFIXES), values, strict=True)
    return row


def _find_commit(run: Results) -> object:
    """Return the commits that a run was made with, joined by `; `."""
    codes = [origin.get("code") for origin in list_origins(run.provenance)]
    commits = [str(code["commit"]) for code in codes if isinstance(code, Mapping) and code.get("commit")]
    return "; ".join(dict.fromkeys(commits)) or None


def list_settings(run: Results) -> dict[str, Value]:
    """Return the settings of `SECTIONS` by dotted path."""
    sections = {section: run.setting(section) for section in SECTIONS} | {"storage": run.storage}
    return {name: value for section in sections.items() for name, value in _flatten_settings(*section)}


def _flatten_settings(name: str, value: object) -> Iterator[tuple[str, Value]]:
    """Yield the settings below a name by dotted path."""
    if isinstance(value, Mapping):
        if name.startswith("method.") and "_target_" in value:  # the class of an inner method
            yield name, str(value["_target_"]).rpartition(".")[2]
        for key, item in value.items():
            if key not in DERIVED_SETTINGS:
                yield from _flatten_settings(f"{name}.{key}", item)
    else:
        yield name, _write(value)


def _write(value: object) -> Value:
    """Return a setting as one value; a list or mapping becomes JSON."""
    return value if value is None or isinstance(value, str | int | float) else json.dumps(value)


def find_kinds(rows: Iterable[FlatRow]) -> dict[str, ColumnType]:
    """Return the types of columns that hold something: integers and floats are floats, other mixtures are text."""
    held: dict[str, set[ColumnType]] = {}
    for row in rows:
        for name, value in row.items():
            if value is not None:
                held.setdefault(name, set()).add(COLUMN_TYPES[type(value)])
    mixed: dict[str, ColumnType] = {
        name: "float" if kinds == {"int", "float"} else "text" for name, kinds in held.items()
    }
    return mixed | {name: next(iter(kinds)) for name, kinds in held.items() if len(kinds) == 1}


def order_columns(names: Iterable[str], fixed: ColumnTypes) -> list[str]:
    """Return columns in order: fixed ones, settings, then metrics, each followed by its interval and n."""
    first = {name: index for index, name in enumerate(fixed)}

    def find_rank(name: str) -> tuple[int, str, int]:
        if name in first:
            return first[name], "", 0
        if name.partition(".")[0] in SECTIONS:
            return len(first), name, 0
        end = next((index for index, end in enumerate(METRIC_SUFFIXES) if end and name.endswith(end)), 0)
        return len(first) + 1, name.removesuffix(METRIC_SUFFIXES[end]), end

    return sorted(names, key=find_rank)
