"""Runs and samples as flat rows: plain values by column, and the types of columns (docs/data.md)."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, fields
from typing import Literal, get_args

from kvbench.runs.record.costs import Cost
from kvbench.runs.record.results import Latency, Memory, Results

Value = str | float | bool | None
Row = Mapping[str, Value]
"""Values by column."""
Kind = Literal["null", "bool", "int", "float", "text"]
Kinds = Mapping[str, Kind]
"""Types of columns; a `null` column is empty."""

KINDS: Mapping[type, Kind] = {bool: "bool", int: "int", float: "float", str: "text"}
SECTIONS = ("method", "model", "prompts", "calibrate")
"""Groups of the configuration whose settings are columns."""
UNSAID = ("_target_", "_convert_", "name", "transformer", "tokenizer", "sources")
"""Settings of these groups that follow from the names of model, method and prompts, or that identify no run."""
ENDS = ("", ".low", ".high", ".n")
"""Columns of a metric: its value, the ends of its 95 % interval, the samples behind it."""


def list_kinds(section: str, kind: type) -> dict[str, Kind]:
    """Return the columns of a dataclass of numbers and texts, `<section>.<field>`."""
    found: dict[str, Kind] = {}
    for field in fields(kind):
        inner = get_args(field.type)  # of a literal its values
        held = (field.type, *inner, *map(type, inner))
        found[f"{section}.{field.name}"] = next(word for one, word in KINDS.items() if one in held)
    return found


IDENTITY: Mapping[str, tuple[Kind, Callable[[Results], object]]] = {
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
    "seed": ("int", lambda run: run.setting("seed")),
    "batch_size": ("int", lambda run: run.setting("batch_size")),
    "device": ("text", lambda run: run.setting("device")),
    "cache_dtype": ("text", lambda run: run.setting("cache_dtype")),
    "commit": ("text", lambda run: _find_commit(run)),
    "finished": ("text", lambda run: run.finished),
}
"""Columns that describe a run: type and value of each."""
FIXED: Kinds = {
    "folder": "text",
    **{name: kind for name, (kind, _) in IDENTITY.items()},
    **list_kinds("memory", Memory),
    **list_kinds("latency", Latency),
}
"""Columns that every frame of runs has."""
SAMPLE: Kinds = {
    "folder": "text",
    "index": "int",
    "prompt": "text",
    "seed": "int",
    **{name.removeprefix("sample."): kind for name, kind in list_kinds("sample", Cost).items()},
}
"""Columns that every frame of samples has."""


def flatten_run(run: Results) -> dict[str, Value]:
    """Return a run as a row without its `folder`; of its configuration the settings that identify it."""
    row = {name: _write(find(run)) for name, (_, find) in IDENTITY.items()}
    for section in SECTIONS:
        row |= _flatten_settings(section, run.setting(section))
    row |= {f"memory.{name}": value for name, value in asdict(run.memory).items()}
    row |= {f"latency.{name}": value for name, value in asdict(run.latency).items()}
    for name, metric in run.metrics.items():
        values = (metric.value, *(metric.ci95 or (None, None)), None if metric.value is None else metric.n)
        row |= zip((name + end for end in ENDS), values, strict=True)
    return row


def _find_commit(run: Results) -> object:
    code = (run.provenance or {}).get("code")
    return code.get("commit") if isinstance(code, Mapping) else None


def _flatten_settings(name: str, value: object) -> Iterator[tuple[str, Value]]:
    """Yield every setting below a name with its dotted path."""
    if isinstance(value, Mapping):
        if name.startswith("method.") and "_target_" in value:  # the class of a method inside another
            yield name, str(value["_target_"]).rpartition(".")[2]
        for key, item in value.items():
            if key not in UNSAID:
                yield from _flatten_settings(f"{name}.{key}", item)
    else:
        yield name, _write(value)


def _write(value: object) -> Value:
    """Return a setting as one value: a list as JSON."""
    return value if value is None or isinstance(value, str | int | float) else json.dumps(value)


def find_kinds(row: Row) -> dict[str, Kind]:
    """Return what the columns of one row hold."""
    return {name: "null" if value is None else KINDS[type(value)] for name, value in row.items()}


def merge_kinds(every: Iterable[Kinds]) -> dict[str, Kind]:
    """Return what columns hold that hold several kinds: whole numbers beside others are numbers, all else is text."""
    found: dict[str, set[Kind]] = {}
    for kinds in every:
        for name, kind in kinds.items():
            found.setdefault(name, set()).add(kind)
    return {name: _merge(kinds - {"null"}) for name, kinds in found.items()}


def _merge(kinds: set[Kind]) -> Kind:
    if len(kinds) < 2:
        return next(iter(kinds), "null")
    return "float" if kinds == {"int", "float"} else "text"


def order_columns(names: Iterable[str], fixed: Kinds) -> list[str]:
    """Return columns in order: those that are fixed, settings, then metrics, each with its interval behind it."""
    first = {name: place for place, name in enumerate(fixed)}

    def place(name: str) -> tuple[int, str, int]:
        if name in first:
            return first[name], "", 0
        if name.partition(".")[0] in SECTIONS:
            return len(first), name, 0
        end = next((place for place, end in enumerate(ENDS) if end and name.endswith(end)), 0)
        return len(first) + 1, name.removesuffix(ENDS[end]), end

    return sorted(names, key=place)
